"""The client must not be the limit."""

from __future__ import annotations

from loadtest.plan import Level
from tests.fake_openai import FakeServer, Script
from tests.unit.loadtest.rig import quiet_machine, run


def test_twenty_thousand_streamed_tokens_a_second(fake: FakeServer) -> None:
    """256 streams at 8 ms a token, one write a token: up to 32,000 tok/s, from a server on the same cores."""
    with quiet_machine(fake):
        script = Script(itl_s=0.008, log_writes=False)
        ran = run(fake, script, Level(0, 256, requests=768, ramp_s=1.0, timeout_s=60), output_tokens=128)
        assert ran.measured.failed == 0
        assert ran.measured.output_tok_s is not None
        assert ran.summary.client is not None
        assert ran.measured.output_tok_s >= 20_000, ran.summary.client
        assert ran.summary.client.busy < 0.9
