"""Processes that a handler forks: they neither stop the service nor answer for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onceward import runtime

from tests.servers.waiting import PATIENCE

PROGRAM = """
import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import time
from concurrent.futures import ProcessPoolExecutor

from onceward import Handlers, Service
from onceward.runtime import process
from onceward.settings import Settings

log = logging.getLogger("onceward")
executor = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))


class Forked:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    def exitcode(self) -> int | None:
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None


def be_a_child() -> None:
    log.info("the child can log")
    time.sleep(600)


def fork() -> Forked:
    pid = os.fork()
    if pid == 0:
        be_a_child()
        os._exit(0)
    return Forked(pid)


def start() -> multiprocessing.Process:
    child = multiprocessing.get_context("fork").Process(target=be_a_child)
    child.start()
    return child


def submit() -> multiprocessing.Process:
    executor.submit(be_a_child)
    [child] = multiprocessing.active_children()
    return child


def sockets(pid: int) -> set[str]:
    folder = f"/proc/{{pid}}/fd"
    return {{os.readlink(f"{{folder}}/{{one}}") for one in os.listdir(folder)}}


def has_logged() -> bool:
    return "the child" in open(os.environ["LOG"]).read()


async def main() -> None:
    service = Service("forking", handlers=Handlers(), metadata=None)
    settings = Settings(
        database_url="postgresql+asyncpg://s:s@127.0.0.1:1/s",
        kafka_bootstrap_servers="127.0.0.1:1",
        health_port=0,
        log_json=False,
    )
    async with process(service, settings) as (_, stopping):
        child = {how}
        while not has_logged():
            await asyncio.sleep(0.01)
        listening = [line.split()[9] for line in open("/proc/net/tcp") if line.split()[3] == "0A"]
        kept = sockets(child.pid) & {{f"socket:[{{inode}}]" for inode in listening}}
        os.kill(child.pid, signal.SIGTERM)
        while (code := child.exitcode) is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        print(code, sorted(kept), stopping.is_set())
        os.kill(os.getpid(), signal.SIGTERM)
        await stopping.wait()


asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("fork()", id="os.fork"),
        pytest.param("start()", id="multiprocessing"),
        pytest.param("await asyncio.to_thread(submit)", id="a pool, in a thread"),
    ],
)
def test_a_forked_process_neither_stops_the_service_nor_keeps_its_port(
    how: str, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    with path.open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(how=how)],
            env=os.environ
            | {"PYTHONPATH": str(Path(runtime.__file__).parents[1]), "LOG": str(path)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=PATIENCE,
        )
    assert (done.returncode, done.stdout) == (0, "-15 [] False\n"), path.read_text()
