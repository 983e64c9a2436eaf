"""python rename_engine.py CLONE: names of the engine that had several meanings."""
import pathlib, re, sys
root = pathlib.Path(sys.argv[1]); svc = root / "<<cookiecutter.service_name>>"
for p in [*(svc / "src").rglob("*.py"), *(svc / "tests").rglob("*.py"), *(root / "tests").rglob("*.py"), *(svc / "src/onceward").rglob("README.md")]:
    s = old = p.read_text()
    # Attempts -> Retrying
    s = re.sub(r"(import (?:\w+, )*)Attempts\b", r"\1Retrying", s)
    s = re.sub(r"\bAttempts(?=[(\]])", "Retrying", s)
    s = re.sub(r"(->|:) Attempts\b(?=[,)\n: ])(?! \w)", r"\1 Retrying", s)
    s = s.replace("`Attempts`", "`Retrying`").replace("class Attempts:", "class Retrying:")
    # Memory -> Findings
    if "relay" not in p.as_posix() and (re.search(r"\bMemory\b", s) or "attempt.memory." in s):
        s = re.sub(r"\bMemory\b", "Findings", s)
        s = re.sub(r"\bmemory(: Findings| = Findings| = memory or Findings|=Findings\()", lambda m: "findings" + m[1].replace("memory or", "findings or"), s)
        s = re.sub(r"\bmemory\.(handed|decisions|suspects)", r"findings.\1", s)
        s = re.sub(r"\.memory\.", ".findings.", s)
        s = re.sub(r"\bmemory, (attempts, losses|loop\.time)", r"findings, \1", s)
        s = re.sub(r", memory\)", ", findings)", s); s = re.sub(r", memory, ", ", findings, ", s)
        s = re.sub(r"^(\s+)memory,$", r"\1findings,", s, flags=re.M)
        s = s.replace("`memory`", "`findings`")
    if "onceward/relay" in p.as_posix() or p.name == "test_relay.py":
        s = re.sub(r"\b(extend|write|move)_in_time\b", r"\1_if_due", s)
    if p.name in ("limits.py", "transactions.py", "test_slots.py"):
        s = re.sub(r"\bSlots\b", "ConcurrencyLimit", s)
    if s != old: p.write_text(s)
