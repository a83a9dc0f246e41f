"""What scaled-object.yaml does to replicas, and to whoever waits, simulated.

    python serving_configs/k8s/autoscaling.py

Replicas serve a steady Poisson load; once a quarter of a minute the autoscaler looks. The rules are
those of Kubernetes (HorizontalPodAutoscaler: desired replicas by an average value, a tolerance of
10 %, stabilization windows, policies) and of KEDA (after a failed query replicas stay as they are,
a `fallback` sets them). A replica decodes its batch in steps that get slower with its size, and
takes three minutes to start. Prefill is left out.
"""

import argparse
import dataclasses
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import yaml

HERE = Path(__file__).parent
SYNC_SECONDS = 15
TOLERANCE = 0.1  # of kube-controller-manager
START_SECONDS = 180
BATCH = 256  # max-num-seqs of ../vllm/one-gpu.yaml
TOKENS = 250.0  # of an answer, mean of an exponential distribution
STEP_SECONDS = 0.008  # of one step with an empty batch
SEQUENCE_SECONDS = 0.00006  # and of each sequence in it
CAPACITY = BATCH / (STEP_SECONDS + BATCH * SEQUENCE_SECONDS) / TOKENS  # requests/s of one replica


@dataclass(frozen=True)
class Rule:
    """What of a ScaledObject decides about replicas."""

    running: bool  # requests that run are counted, and not only those that wait
    threshold: float
    minimum: int
    maximum: int
    up_window: int
    up_seconds: int  # for each replica more
    down_window: int
    down_seconds: int
    fallback: int | None

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> "Rule":
        """The rule of a ScaledObject with one trigger and one policy in each direction."""
        spec = manifest["spec"]
        (trigger,) = spec["triggers"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        (up,), (down,) = behavior["scaleUp"]["policies"], behavior["scaleDown"]["policies"]
        if {up["type"], down["type"]} != {"Pods"} or {up["value"], down["value"]} != {1}:
            raise ValueError("policies: expected one of type Pods and value 1 in each direction")
        return cls(
            "vllm:num_requests_running" in trigger["metadata"]["query"],
            float(trigger["metadata"]["threshold"]),
            spec["minReplicaCount"],
            spec["maxReplicaCount"],
            behavior["scaleUp"]["stabilizationWindowSeconds"],
            up["periodSeconds"],
            behavior["scaleDown"]["stabilizationWindowSeconds"],
            down["periodSeconds"],
            spec.get("fallback", {}).get("replicas"),
        )


@dataclass
class Replica:
    """A batch of answers, by the tokens that each still has to write, and a queue."""

    ready_at: float
    left: Any = field(default_factory=lambda: numpy.zeros(0))
    queue: deque[tuple[float, float]] = field(default_factory=deque)  # (arrival, tokens)
    leaving: bool = False

    def load(self) -> int:
        return len(self.left) + len(self.queue)

    def step(self, now: float) -> None:
        """One second of decoding."""
        room = BATCH - len(self.left)
        if room and self.queue:
            joining = [self.queue.popleft()[1] for _ in range(min(room, len(self.queue)))]
            self.left = numpy.concatenate([self.left, joining])
        self.left = self.left - 1 / (STEP_SECONDS + SEQUENCE_SECONDS * len(self.left))
        self.left = self.left[self.left > 0]


@dataclass(frozen=True)
class Outcome:
    """Of the seconds after the warm-up."""

    waiting: float  # share of seconds at which somebody has waited for more than a second
    changes: float  # of the number of replicas, per hour
    mean: float  # replicas
    fewest: int


def simulate(
    rule: Rule,
    rate: float,
    *,
    hours: float = 3,
    warm_up_hours: float = 1,
    seed: int = 0,
    prometheus: Callable[[float], bool] = lambda second: True,
) -> Outcome:
    """Serve `rate` requests a second.

    Args:
        rule: what scales.
        rate: requests a second, at all times.
        hours: of the simulation.
        warm_up_hours: of these, what does not count.
        seed: of arrivals and lengths.
        prometheus: whether it answers at this second.
    """
    random = numpy.random.default_rng(seed)
    replicas = [Replica(0.0) for _ in range(rule.minimum)]
    scaler = _Autoscaler(rule)
    counts: list[int] = []
    waited: list[bool] = []
    for second in range(int(hours * 3600)):
        ready = [one for one in replicas if not one.leaving and one.ready_at <= second]
        arrived = int(random.poisson(rate))
        # As nginx's least_conn does: each to the one with the fewest connections.
        heap = [(one.load(), index) for index, one in enumerate(ready)]
        heapq.heapify(heap)
        for tokens in random.exponential(TOKENS, arrived):
            load, index = heap[0]
            ready[index].queue.append((float(second), float(tokens)))
            heapq.heapreplace(heap, (load + 1, index))
        for one in replicas:
            one.step(second)
        replicas = [one for one in replicas if one.load() or not one.leaving]
        if second % SYNC_SECONDS == 0:
            metric = sum(
                len(one.queue) + (len(one.left) if rule.running else 0) for one in replicas
            )
            present = [one for one in replicas if not one.leaving]
            wanted = scaler.decide(second, len(present), metric if prometheus(second) else None)
            replicas += [Replica(second + START_SECONDS) for _ in range(wanted - len(present))]
            for one in present[wanted:]:
                one.leaving = True  # the youngest go, after what they answer
        counts.append(sum(not one.leaving for one in replicas))
        waited.append(any(one.queue and second - one.queue[0][0] > 1 for one in replicas))
    counted = slice(int(warm_up_hours * 3600), None)
    after = counts[counted]
    changes = sum(before != now for before, now in itertools.pairwise(after))
    return Outcome(
        float(numpy.mean(waited[counted])),
        changes / (hours - warm_up_hours),
        float(numpy.mean(after)),
        min(after),
    )


class _Autoscaler:
    """HorizontalPodAutoscaler's decision, every SYNC_SECONDS."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._recommended: deque[tuple[float, int]] = deque()
        self._went_up = self._went_down = -math.inf

    def decide(self, now: float, present: int, metric: float | None) -> int:
        """How many replicas there are to be.

        Args:
            now: seconds.
            present: replicas that there are, ready or starting.
            metric: what the query says, or None if it says nothing.
        """
        rule = self._rule
        if metric is None:
            if rule.fallback is None:
                return present
            wanted = rule.fallback
        elif abs(metric / (rule.threshold * present) - 1) <= TOLERANCE:
            wanted = present
        else:
            wanted = math.ceil(metric / rule.threshold)
        self._recommended.append((now, wanted))
        longest = max(rule.up_window, rule.down_window)
        while self._recommended[0][0] < now - longest:
            self._recommended.popleft()
        lowest = min(n for at, n in self._recommended if at >= now - rule.up_window)
        highest = max(n for at, n in self._recommended if at >= now - rule.down_window)
        goal = min(max(present, lowest), highest)
        goal = min(max(goal, rule.minimum), rule.maximum)
        if goal > present and now - self._went_up >= rule.up_seconds:
            self._went_up = now
            return present + 1
        if goal < present and now - self._went_down >= rule.down_seconds:
            self._went_down = now
            return present - 1
        return present


def committed() -> Rule:
    """That of scaled-object.yaml."""
    return Rule.of(yaml.safe_load((HERE / "scaled-object.yaml").read_text()))


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=5, help="of each simulation (default 5)")
    hours = parser.parse_args().hours
    rule = committed()
    waiting = dataclasses.replace(rule, running=False, threshold=5, down_window=900)
    rules = {
        f"running + waiting, {rule.threshold:g} per replica, down after {rule.down_window} s": rule,
        "waiting alone, 5 per replica, down after 900 s": waiting,
    }
    print("Load: in replicas at capacity. Waiting: share of time when somebody waits over 1 s.\n")
    print("| scaled by | load | waiting | changes/h | replicas |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, one in rules.items():
        for load in (0.5, 0.9, 1.3, 1.8, 2.3, 3.0):
            got = simulate(one, load * CAPACITY, hours=hours)
            print(f"| {name} | {load} | {got.waiting:.1%} | {got.changes:.1f} | {got.mean:.2f} |")
    print("\nPrometheus is lost for an hour, at a load of 2.3 replicas:\n")
    print("| | fewest replicas | waiting |")
    print("| --- | ---: | ---: |")
    fallback = dataclasses.replace(rule, fallback=2)
    for name, one in (("as committed", rule), ("fallback: 2", fallback)):
        got = simulate(one, 2.3 * CAPACITY, hours=3, prometheus=prometheus_lost)
        print(f"| {name} | {got.fewest} | {got.waiting:.1%} |")


def prometheus_lost(second: float) -> bool:
    """It answers, but for the second hour."""
    return not 3600 <= second < 7200


if __name__ == "__main__":
    main()
