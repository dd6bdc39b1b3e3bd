"""A compiled forward that raises has written nothing yet: eager runs the call again and raises what it raises.

So the error, its type, its text and its line are eager's, and so is what eager has written by then; a `try` inside the
program catches what it would. Nothing else knows at which of its writes eager would have stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aottrain.errors import UnsupportedError, is_out_of_memory
from aottrain.ops.random.mode import PhiloxMode
from aottrain.runtime.executor import Runner


class ForwardRaised(Exception):
    """Signal, not an error: the forward raised `error`, before anything of the caller's was written."""

    def __init__(self, error: Exception, state: Tensor | None, generators: Mapping[torch.device, Tensor]):
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error
        self._state = state
        self._generators = generators

    def refusal(self) -> UnsupportedError:
        """Where eager has not raised, as where the program catches it."""
        return UnsupportedError(f"the compiled forward raised where eager does not: {self}")

    def run_again(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What eager gives, or raises, drawing the random numbers that the forward drew."""
        for device, before in self._generators.items():
            _set_generator(device, before)
        if self._state is None:
            return function(*args, **kwargs)
        with PhiloxMode(self._state):
            return function(*args, **kwargs)


def signalling(forward: Runner, draws: bool, drawn_from: Sequence[torch.device]) -> Runner:
    """A forward that raises ForwardRaised for whatever it raises.

    draws: whether its last input is the state of its random draws; drawn_from: devices of the generators of eager's
    that it draws from itself.
    """

    def run(inputs: list[Any]) -> list[Any]:
        state = inputs[-1] if draws else None
        generators = {device: _generator(device) for device in drawn_from}
        try:
            return forward(inputs)
        except Exception as error:
            if is_out_of_memory(error):  # running again would need as much memory, or more
                raise
            raise ForwardRaised(error, state, generators) from error

    return run


def _generator(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generator(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
