"""A fake OpenAI server with known truth: a real process on a real socket whose delays, tokens and faults are given.

`with FakeServer(Script(ttft_s=0.2, itl_s=0.02)) as server: ... server.url ...`; afterwards `server.log()` says what
it really did (clock readings of every write), and `server.counters()` what it counted. Any HTTP client can use it.
"""

from tests.fake_openai.process import FakeServer
from tests.fake_openai.script import FAULTS, Fault, Script

__all__ = ["FAULTS", "FakeServer", "Fault", "Script"]
