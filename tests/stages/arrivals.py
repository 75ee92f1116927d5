"""What an engine is to `generate`, with answers that arrive in an order drawn by a seed: a real one cannot be told when to finish what.

An answer depends on its sample's id alone, as a real one does, so that runs with other arrivals must leave the same.
"""

import random
from collections.abc import Callable, Collection, Iterable

from jobs.errors import Interrupted
from jobs.verifier.requests import Finished, Request


class Arrivals:
    """lost: samples whose states are incomplete at the end. stop_after: answers until it is interrupted.

    watch: called after every answer with the bound method's owner, the `Answering` that is under test.
    """

    waits = (0.0, 0.0)
    tokens = 0

    def __init__(
        self, seed: int, places: int, *, mean: float = 12, lost: Callable[[str], bool] = lambda _: False,
        stop_after: int | None = None, watch: Callable = lambda _: None,
    ):  # fmt: skip
        self.rng, self.places, self.mean, self.lost, self.stop_after, self.watch = (
            random.Random(seed),
            places,
            mean,
            lost,
            stop_after,
            watch,
        )
        self.waiting: list[Request] = []
        self.handed_out: list[Finished] = []
        self.discarded: list[str] = []

    def open_store(self, *_: object) -> None: ...

    def close_store(self) -> None: ...

    def discard(self, samples: Collection[str]) -> None:
        self.discarded += samples
        self.waiting[:] = [request for request in self.waiting if request.id not in samples]

    def run(
        self, requests: Iterable[Request], on_finished: Callable[[Finished], Iterable[Request]], should_stop: Callable[[], bool]
    ) -> None:
        source = iter(requests)
        while True:
            while len(self.waiting) < self.places and (request := next(source, None)):
                self.waiting.append(request)
            if not self.waiting:
                return
            if self.stop_after is not None and len(self.handed_out) >= self.stop_after:
                raise Interrupted("Stopped")
            request = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            self.handed_out.append(Finished(request, self.answer(request), "stop", "a row is missing" if self.lost(request.id) else None))
            self.waiting += on_finished(self.handed_out[-1])
            self.watch(on_finished.__self__)

    def answer(self, request: Request) -> list[int]:
        """Lengths with a long tail, as answers have."""
        rng = random.Random(request.id)
        return [rng.randrange(100, 400) for _ in range(max(1, min(request.max_tokens, round(rng.expovariate(1 / self.mean)))))]
