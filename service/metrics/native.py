"""The engines' own Prometheus text (`vllm:*`, `llamacpp:*`) of several replicas as one text."""

from __future__ import annotations

import re
from collections.abc import Mapping

PREFIXES = ("vllm:", "llamacpp:")
_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S.*)$")


def merge(texts: Mapping[str, str]) -> list[str]:
    """Lines in Prometheus' format; every sample gets `replica="<key>"`; a family's lines stand together.

    Families with other prefixes (process, garbage collector) are left out: over replicas they would clash with ours.
    A line that is not a sample is left out: an engine's text must not be able to break the whole scrape.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                words = line.split(" ", 3)
                if len(words) == 4 and words[1] in ("HELP", "TYPE") and words[2].startswith(PREFIXES):
                    family = words[2]
                    known = heads.setdefault(family, [])
                    if not any(head.startswith(f"# {words[1]} ") for head in known):
                        known.append(line)
                continue
            match = _SAMPLE.match(line)
            if match is None or not match[1].startswith(PREFIXES):
                continue
            if not (family and match[1].startswith(family)):
                family = match[1]
            labels = f"{match[2].rstrip(',')}," if match[2] else ""
            samples.setdefault(family, []).append(f'{match[1]}{{{labels}replica="{replica}"}} {match[3]}')
    return [line for family, lines in samples.items() for line in (*heads.get(family, ()), *lines)]
