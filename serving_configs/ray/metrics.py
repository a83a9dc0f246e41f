"""One page of Prometheus metrics out of those of all replicas.

A scrape through Serve reaches one replica, each time another one. So whichever replica is asked
asks all of them, and tells their samples apart by a label. `loadtest` and Prometheus' rules sum
over labels; when a replica is gone, so are its samples, and Prometheus ends their series.
"""

import re
from collections.abc import Mapping

# name{labels} value: labels may hold any character, the value holds no brace.
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^}]+)")


def merged(texts: Mapping[str, str]) -> str:
    """Prometheus' text format 0.0.4, in which lines of a metric stand together, under one header.

    Args:
        texts: what each replica's /metrics says, by the replica's id.
    """
    headers: dict[str, list[str]] = {}  # by metric: HELP and TYPE
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        metric, known = "", False
        for line in text.splitlines():
            if line.startswith("#"):
                _, keyword, name = line.split(" ", 3)[:3]
                if keyword not in ("HELP", "TYPE"):
                    continue
                if name != metric:
                    metric, known = name, name in samples
                    samples.setdefault(name, [])
                if not known:
                    headers.setdefault(name, []).append(line)
            elif sample := SAMPLE.fullmatch(line):
                name, labels, value = sample.groups()
                labelled = f'replica="{replica}"' + (f",{labels}" if labels else "")
                samples.setdefault(metric, []).append(f"{name}{{{labelled}}} {value}")
    lines = [line for name in samples for line in (*headers.get(name, []), *samples[name])]
    return "".join(f"{line}\n" for line in lines)
