import asyncio
import http.client
import json
import logging
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from onceward.observe import health as module
from onceward.observe import watchdog
from onceward.observe.health import (
    MOST_REQUESTS,
    CannotListen,
    Health,
    ReadinessLog,
    serving,
)

from tests.servers.waiting import PATIENCE

HOST = "127.0.0.1"


class Clock:
    def __init__(self) -> None:
        # From the real one on: `health` may have looked at that before.
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def health() -> Health:
    return Health(stall_after=10)


@pytest.fixture
def port(health: Health) -> Iterator[int]:
    with serving(health, host=HOST, port=0) as port:
        yield port


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read()
    finally:
        connection.close()


def answer(port: int, path: str) -> tuple[int, Any]:
    status, content_type, body = ask(port, path)
    assert content_type == "application/json"
    return status, json.loads(body)


def test_a_process_of_which_nothing_has_reported_is_not_ready(port: int) -> None:
    status, body = answer(port, "/health/ready")
    assert status == 503
    assert body == {"ready": False, "reasons": {"process": "no part has reported yet"}}


def test_a_process_is_ready_when_every_part_is(health: Health, port: int) -> None:
    health.ready("database")
    health.not_ready("relay", "holds no shard yet")
    assert answer(port, "/health/ready") == (
        503,
        {"ready": False, "reasons": {"relay": "holds no shard yet"}},
    )
    health.ready("relay")
    assert answer(port, "/health/ready") == (200, {"ready": True, "reasons": {}})
    assert health.is_ready


def test_a_part_that_is_forgotten_is_not_waited_for(health: Health) -> None:
    health.ready("consumer")
    health.not_ready("partition scans/3", "stuck at offset 42")
    assert not health.is_ready
    health.forget("partition scans/3")
    health.forget("partition scans/3")
    assert health.is_ready


def test_a_process_is_not_alive_while_its_event_loop_is_blocked(clock: Clock) -> None:
    health = Health(stall_after=10)
    health.ready("consumer")
    with serving(health, host=HOST, port=0) as port:
        clock.now += 10
        assert answer(port, "/health/live") == (200, {"alive": True, "seconds_since_beat": 10})
        clock.now += 0.5
        assert answer(port, "/health/live") == (503, {"alive": False, "seconds_since_beat": 10.5})
        status, told = answer(port, "/health/ready")
        assert (status, told["reasons"]) == (503, {"event loop": "blocked for 10 s"})
        health.beat()
        assert answer(port, "/health/ready")[0] == 200
        assert answer(port, "/health/live") == (200, {"alive": True, "seconds_since_beat": 0})


def test_the_server_answers_while_the_event_loop_is_blocked(port: int) -> None:
    async def block_the_loop() -> int:
        return answer(port, "/health/live")[0]

    assert asyncio.run(block_the_loop()) == 200


def test_an_outage_elsewhere_does_not_end_liveness(health: Health, port: int) -> None:
    health.not_ready("database", "connection refused")
    health.not_ready("consumer", "no broker answers")
    assert answer(port, "/health/live")[0] == 200


def test_metrics_are_served_as_prometheus_reads_them(port: int) -> None:
    status, content_type, body = ask(port, "/metrics")
    assert status == 200
    assert content_type.startswith("text/plain; version=0.0.4")
    families = {family.name for family in text_string_to_metric_families(body.decode())}
    assert "python_info" in families


class Collector:
    """A collector of metrics that runs `during` in every scrape."""

    def __init__(self, during: Callable[[], object]) -> None:
        self._during = during

    def describe(self) -> list[CounterMetricFamily]:
        return []

    def collect(self) -> list[CounterMetricFamily]:
        self._during()
        return []


@contextmanager
def registered(during: Callable[[], object]) -> Iterator[None]:
    collector = Collector(during)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)


def test_scrapes_wait_for_each_other_because_collectors_mix(port: int) -> None:
    meeting = threading.Barrier(2)
    met = []

    def try_to_meet() -> None:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(timeout=0.2)
            met.append(True)

    with registered(try_to_meet), ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask(port, "/metrics")[0], range(2)))
    assert answers == [200, 200]
    assert met == []


def test_a_scrape_that_fails_is_logged_and_the_server_lives(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ArithmeticError("cannot count")

    with registered(fail), pytest.raises(http.client.RemoteDisconnected):
        ask(port, "/metrics")
    assert ask(port, "/metrics")[0] == 200
    (record,) = caplog.records
    assert record.getMessage() == "a request for health or metrics failed"


@pytest.mark.parametrize("path", ["/", "/health", "/metrics/", "//[", "/health/live/../ready"])
def test_other_paths_are_not_found(port: int, path: str) -> None:
    status, body = answer(port, path)
    assert status == 404
    assert "/health/ready" in body["error"]


def test_a_query_does_not_hide_a_path(health: Health, port: int) -> None:
    assert answer(port, "/health/live?verbose=1")[0] == 200


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics", "/other"])
def test_head_answers_like_get_without_a_body(port: int, path: str) -> None:
    status, content_type, _ = ask(port, path)
    with socket.create_connection((HOST, port), timeout=PATIENCE) as connection:
        connection.sendall(f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.0 {status} ".encode())
    assert f"Content-Type: {content_type}".encode() in head
    assert body == b""


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health/live HTTP/9.9.9\r\n\r\n",
        b"POST /health/live HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"GET /health/live HTTP/1.1\r\nno header\x00\xff\r\n\r\n",
        b"",
    ],
)
def test_malformed_requests_print_nothing_and_the_server_lives(
    port: int,
    request_bytes: bytes,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with socket.create_connection((HOST, port), timeout=PATIENCE) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65_536):
            pass
    assert answer(port, "/health/live")[0] == 200
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_a_client_that_goes_away_is_no_error(port: int, caplog: pytest.LogCaptureFixture) -> None:
    asked, gone = threading.Event(), threading.Event()

    def wait_until_gone() -> None:
        asked.set()
        gone.wait(5)

    with registered(wait_until_gone):
        client = socket.create_connection((HOST, port), timeout=PATIENCE)
        reset_on_close = struct.pack("ii", 1, 0)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert asked.wait(5)
        client.close()
        gone.set()
        for thread in threading.enumerate():
            if "process_request_thread" in thread.name:
                thread.join(5)
    assert caplog.records == []
    assert answer(port, "/health/live")[0] == 200


def test_a_client_that_says_nothing_does_not_hold_up_the_others(port: int) -> None:
    with socket.create_connection((HOST, port), timeout=PATIENCE):
        assert answer(port, "/health/live")[0] == 200


def test_a_client_that_sends_its_request_byte_by_byte_is_cut_off(health: Health) -> None:
    with (
        serving(health, host=HOST, port=0, request_seconds=0.5) as port,
        socket.create_connection((HOST, port), timeout=PATIENCE) as slow,
    ):
        sent = 0
        with suppress(ConnectionError):
            while sent < 10_000:
                slow.sendall(b"x")
                sent += 1
                assert answer(port, "/health/live")[0] == 200
        assert 0 < sent < 10_000


def test_silent_clients_take_few_threads_and_keep_nobody_out(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(4 * MOST_REQUESTS):
            stack.enter_context(socket.create_connection((HOST, port), timeout=PATIENCE))
            assert requests_under_way() <= MOST_REQUESTS
        assert answer(port, "/health/live")[0] == 200
        assert requests_under_way() <= MOST_REQUESTS


def requests_under_way() -> int:
    return sum("process_request_thread" in one.name for one in threading.enumerate())


def test_a_port_in_use_is_told_with_the_setting_to_change(health: Health, port: int) -> None:
    with (
        pytest.raises(CannotListen, match=f"port {port}: the port is in use") as caught,
        serving(health, host=HOST, port=port),
    ):
        pytest.fail("it serves")
    assert "PIPELINE_HEALTH_PORT" in str(caught.value)


def test_an_address_of_another_machine_is_told_with_the_setting_to_change(health: Health) -> None:
    with (
        pytest.raises(CannotListen, match="PIPELINE_HEALTH_HOST"),
        serving(health, host="192.0.2.1", port=0),
    ):
        pytest.fail("it serves")


def test_stopping_frees_the_port_and_ends_the_thread(health: Health) -> None:
    before = threading.active_count()
    with serving(health, host=HOST, port=0) as port:
        pass
    with serving(health, host=HOST, port=port) as again:
        assert again == port
    assert threading.active_count() == before


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_an_ipv6_host_is_served(health: Health) -> None:
    with serving(health, host="::1", port=0) as port:
        socket.create_connection(("::1", port), timeout=PATIENCE).close()


@pytest.fixture
def announced(
    health: Health, clock: Clock, caplog: pytest.LogCaptureFixture
) -> Callable[[], list[str]]:
    """Return what is announced now, a second and a turn of the event loop later."""
    caplog.set_level(logging.INFO, "onceward.observe.health")
    announcer = ReadinessLog(health)

    def announce() -> list[str]:
        clock.now += 1
        health.beat()
        caplog.clear()
        announcer.announce()
        return [record.getMessage() for record in caplog.records]

    return announce


Announced = Callable[[], list[str]]


def test_an_outage_is_told_when_it_begins_and_when_it_has_ended(
    health: Health, announced: Announced
) -> None:
    health.ready("relay")
    assert announced() == ["ready, after 1 s"]
    assert announced() == []
    health.not_ready("relay", "PostgreSQL at db:5432: refused")
    assert announced() == ["not ready: relay: PostgreSQL at db:5432: refused"]
    assert [announced() for _ in range(30)] == [[]] * 30
    health.ready("relay")
    assert [line for _ in range(11) for line in announced()] == ["ready, after 31 s"]
    health.not_ready("relay", "PostgreSQL at db:5432: refused")
    assert announced() == ["not ready: relay: PostgreSQL at db:5432: refused"]


def test_a_reason_is_logged_once_for_many_parts_and_changing_numbers(
    health: Health, announced: Announced
) -> None:
    health.not_ready("partition scans/0", "refused")
    assert announced() == ["not ready: partition scans/0: refused"]
    for number in range(1, 10):
        health.not_ready(f"partition scans/{number}", "refused")
        assert announced() == []
    health.not_ready("relay", "Kafka has not answered for 15 s")
    (line,) = announced()
    assert line == (
        "not ready: partition scans/0, partition scans/1, partition scans/2 and 7 more: refused;"
        " relay: Kafka has not answered for 15 s"
    )
    health.not_ready("relay", "Kafka has not answered for 16 s")
    assert announced() == []


def test_parts_that_come_and_go_are_one_outage_until_all_stay(
    health: Health, announced: Announced
) -> None:
    health.ready("relay")
    assert announced() == ["ready, after 1 s"]
    told = []
    for number in range(20):
        health.not_ready("relay", f"slow for {number} s")
        told += announced()
        health.ready("relay")
        told += announced() + announced()
    assert told == ["not ready: relay: slow for 0 s"]
    assert [line for _ in range(30) for line in announced()] == ["ready, after 58 s"]


def test_an_outage_that_lasts_is_told_again_every_minute(
    health: Health, announced: Announced
) -> None:
    health.not_ready("relay", "refused")
    told = [announced() for _ in range(180)]
    assert sum(map(len, told)) == 3


HANG = """
import asyncio, itertools, os, signal, subprocess, time
from onceward.observe import logs, watchdog
from onceward.observe.health import Health

watchdog.LAST_RESORT = 5
watchdog.BEAT = 0.1


def block_the_loop() -> None:
    {hang}


async def main() -> None:
    health = Health(stall_after=2)
    beating = asyncio.create_task(watchdog.heartbeat(health, lambda *_: None, 1))
    await asyncio.sleep(0.3)
    block_the_loop()
    beating.cancel()


logs.configure(level="INFO", json=True)
asyncio.run(main())
{then}
"""


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(module.__file__).parents[2])}


def hang(how: str, then: str = "") -> subprocess.CompletedProcess[str]:
    """Run a process in which a blocked event loop is ended after two seconds."""
    return subprocess.run(
        [sys.executable, "-c", HANG.format(hang=how, then=then)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


CONTINUE = "subprocess.Popen(['sh', '-c', f'sleep {seconds}; kill -CONT {{os.getpid()}}'])"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize("how", ["time.sleep(60)", "while True: pass"])
def test_a_process_whose_loop_hangs_says_why_it_ends(how: str) -> None:
    done = hang(how)
    assert done.returncode == 1
    *_, line = [json.loads(line) for line in done.stderr.splitlines()]
    assert line["level"] == "CRITICAL"
    assert line["logger"] == "onceward.observe.watchdog"
    assert re.match(
        r"the event loop has been blocked for \d+ s: PIPELINE_HANG_TIMEOUT ends", line["message"]
    )
    assert "in block_the_loop" in line["stack"]


def test_a_process_in_which_no_thread_runs_still_ends() -> None:
    done = hang("sum(itertools.repeat(0))")
    assert done.returncode == -signal.SIGALRM
    assert "in block_the_loop" in done.stderr


def test_the_last_resort_is_postponed_once_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    postponed: list[float] = []
    monkeypatch.setattr(watchdog, "_last_resort", lambda seconds: lambda: postponed.append(seconds))
    monkeypatch.setattr(watchdog, "BEAT", 3_600.0)

    class Ticks(threading.Event):
        """Ends the loop after a few of them."""

        left = 10

        def wait(self, timeout: float | None = None) -> bool:
            self.left -= 1
            return self.left == 0

    health = Health(stall_after=math.inf)
    watchdog._watch_loop(health, threading.get_ident(), Ticks())
    assert postponed == [math.inf]


def test_a_process_stopped_for_longer_than_the_last_resort_continues() -> None:
    # Signals are due after 7 s and every 5 s from then on.
    done = hang(f"{CONTINUE.format(seconds=18)}; {STOP}", then="print('to the end')")
    assert (done.returncode, done.stdout) == (0, "to the end\n"), done.stderr
    # Only of the thread that was interrupted: to read those of threads that run ends the process.
    assert done.stderr.count("Stack (most recent call first)") == 1
    assert "Thread 0x" not in done.stderr


UNREAD = """
import logging
from onceward.observe import logs

logs.configure(level="INFO", json=True, queues=True)
for _ in range(1_000):
    logging.getLogger("onceward").info(1_000 * "x")
"""


@pytest.mark.parametrize(
    ("how", "code"), [("time.sleep(60)", 1), ("sum(itertools.repeat(0))", -signal.SIGALRM)]
)
def test_a_process_that_hangs_ends_even_if_nothing_reads_its_log(how: str, code: int) -> None:
    program = HANG.format(hang=how, then="")
    program = program.replace('logs.configure(level="INFO", json=True)\n', UNREAD)
    with subprocess.Popen(
        [sys.executable, "-c", program], env=ENVIRONMENT, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.wait(PATIENCE) == code
        finally:
            process.kill()


def test_a_running_loop_keeps_its_process_alive_and_later_work_is_unwatched() -> None:
    done = hang("pass", then="time.sleep(2.8)")
    assert done.returncode == 0, done.stderr


INTERRUPTED = """
import asyncio, os, re, subprocess, threading, time
import uvloop
from onceward.observe import watchdog
from onceward.observe.health import Health
from onceward.servers.guard import LoopBlocked, interrupt
from onceward.servers.service_code import call_service

lock = threading.Lock()
lock.acquire()


async def block_the_loop() -> None:
    {block}


async def sleep() -> None:
    time.sleep(30)


async def main() -> None:
    health = Health(stall_after=600)
    beating = asyncio.create_task(watchdog.heartbeat(health, interrupt, 0.6))
    for _ in range(2):
        await asyncio.sleep(0.1)
        try:
            await call_service(block_the_loop())
        except LoopBlocked as error:
            print(error)
    beating.cancel()


with asyncio.Runner(loop_factory={loop}) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize(
    ("block", "loop"),
    [
        ("time.sleep(30)", "uvloop.new_event_loop"),
        ("time.sleep(30)", "None"),
        ("while True: pass", "uvloop.new_event_loop"),
        ("lock.acquire()", "uvloop.new_event_loop"),
        ("subprocess.run(['sleep', '30'])", "uvloop.new_event_loop"),
        ("re.match('(a+)+$', 60 * 'a' + 'b')", "uvloop.new_event_loop"),
        # One call of C, during which no handler of signals runs, and in the second no thread.
        ("os.system('sleep 2')", "uvloop.new_event_loop"),
        ("sum(range(100_000_000))", "uvloop.new_event_loop"),
        # In a task that it has begun.
        ("await asyncio.create_task(sleep())", "uvloop.new_event_loop"),
    ],
)
def test_code_of_the_service_that_blocks_the_loop_is_interrupted(block: str, loop: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(block=block, loop=loop)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == 2 * "blocks the event loop: await, or use asyncio.to_thread\n"
    assert "a call was interrupted" in done.stderr
    assert "in block_the_loop" in done.stderr


INNOCENT = """
import asyncio, contextlib, ctypes, os, signal, subprocess, time
from onceward.observe import watchdog
from onceward.observe.health import Health
from onceward.servers.guard import LoopBlocked, interrupt
from onceward.servers.service_code import call_service


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def block_the_loop() -> None:
    time.sleep(60)


def be_found() -> None:
    signal.raise_signal(signal.SIGVTALRM)


async def nap() -> None:
    time.sleep(1.2)
    be_found()


async def step() -> None:
    be_found()
    {within}
    be_found()


async def main() -> None:
    health = Health(stall_after=60)
    beating = asyncio.create_task(watchdog.heartbeat(health, interrupt, 3))
    await asyncio.sleep(0.1)
    # The event loop has no turn between these two.
    {before}
    await call_service(step())
    beating.cancel()


asyncio.run(main())
"""
BLOCKED = "with contextlib.suppress(LoopBlocked): await call_service(block_the_loop())"


@pytest.mark.parametrize(
    ("before", "within"),
    [
        ("time.sleep(4)", "pass"),
        ("compute(4)", "pass"),
        ("ctypes.PyDLL(None).sleep(4)", "pass"),  # no thread of Python runs meanwhile
        (BLOCKED, "pass"),
        ("for _ in range(3): await call_service(nap())", "pass"),
        (CONTINUE.format(seconds=4), STOP),
    ],
)
def test_a_call_is_not_interrupted_for_what_others_have_blocked(before: str, within: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INNOCENT.format(before=before, within=within)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
