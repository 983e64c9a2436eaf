"""python rename_tests.py CLONE: helpers of tests are named for what they are."""
import pathlib, re, subprocess, sys
root = pathlib.Path(sys.argv[1]); svc = root / "<<cookiecutter.service_name>>"
def mv(a, b): subprocess.run(["git", "mv", a, b], cwd=svc, check=True)
mv("tests/onceward/integration/desk.py", "tests/onceward/integration/applier.py")
mv("tests/onceward/effects/desk.py", "tests/onceward/effects/applier.py")
mv("tests/onceward/integration/doors.py", "tests/onceward/integration/tcp_proxy.py")
mv("tests/onceward/integration/test_door.py", "tests/onceward/integration/test_session.py")
mv("tests/onceward/integration/zygote.py", "tests/onceward/integration/fork_server.py")
mv("tests/servers/zygote.py", "tests/servers/fork_server.py")
files = [p for d in (svc / "tests", root / "tests") for p in d.rglob("*.py")]
for p in files:
    s = old = p.read_text()
    s = re.sub(r"desk(?![a-z])", "applier", s); s = re.sub(r"Desk(?![a-z])", "Applier", s)
    s = s.replace("desks", "appliers").replace("DESK", "APPLIER")
    s = s.replace("a applier", "an applier").replace("a new applier", "a new applier").replace("A applier", "An applier")
    s = s.replace("Zygote", "ForkServer")
    s = re.sub(r"\bthe zygote\b", "the fork server", s, flags=re.I) if p.name in ("fork_server.py",) and False else s
    s = s.replace("zygote", "fork_server")
    s = s.replace("test_door.py", "test_session.py").replace("test_door import", "test_session import")
    name = p.relative_to(svc).as_posix() if svc in p.parents else p.name
    if name.endswith("integration/test_bombs.py"):
        s = re.sub(r"\bDoor\b", "Gate", s); s = re.sub(r"\bdoor\b", "gate", s)
    elif name.endswith("unit/test_batch.py"):
        s = re.sub(r"\bdoor\b", "framing", s)
    elif name.endswith("test_session.py"):
        s = s.replace("The handler's door: what a handler does", "What a handler does").replace("door", "session")
    elif name.endswith("integration/conftest.py"):
        s = s.replace('"door"', '"session"')
    elif re.search(r"\bDoor\b", s):
        s = s.replace("doors import Door", "tcp_proxy import TcpProxy")
        s = re.sub(r"\bDoor\b", "TcpProxy", s); s = s.replace("behind_a_door", "behind_a_proxy")
        s = re.sub(r"\bdoor\.go_on\b", "door.restore", s)
        s = s.replace("door.knocks", "door.attempts").replace("self.knocks", "self.attempts")
        s = re.sub(r"\bdoor\b", "proxy", s)
        if name.endswith("tcp_proxy.py"): s = s.replace("def go_on", "def restore").replace("def shut", "def shut")
    if s != old: p.write_text(s)
