"""A CUDA device where there is none: tensors that claim to lie on one, while their elements are in host memory.

Owns what such a device refuses and what it makes the host wait for. All of the engine runs on it, with real numbers:

* An operator that mixes device and host raises, as on a real one; numbers in host memory may take part in elementwise ones.
* Whatever the host waits for is noted with the line that asked (``launching``): reads of elements, shapes that depend on data,
  copies from or to pageable memory, events. While a graph is recorded all of these raise, and so do copies of any kind.
* A graph is a tape of operators on the tensors of its recording. A replay runs these again, and no other code.
* What is copied to pinned memory is garbage until the host has waited for an event behind the copy; what is copied from it must
  not have changed by then.

What it cannot show: kernels that compute something else, limits of a real device, what two threads do at a time. Operators run
one after another on one thread, the one that ``installed`` is entered on. For a machine without a real device: torch believes
that it has one for the rest of the process.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_GARBAGE = 0xA5
_MADE_OF_OTHERS = frozenset({"to", "cpu", "cuda", "type_as"})  # in the end ``_to_copy``
_READ_BY_THE_HOST = frozenset(
    {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere", "masked_select"}
    | {"_unique2", "unique_dim", "unique_consecutive", "bincount", "histc"}
)


class DeviceMisuse(RuntimeError):
    """An operation that a real device would refuse."""


class ClaimedTensor(Tensor):
    """A tensor on the device; its ``elements`` are a tensor in host memory, views of one share them as they should."""

    elements: Tensor
    owner: ClaimedCuda

    @staticmethod
    def __new__(cls: type[ClaimedTensor], elements: Tensor, owner: ClaimedCuda) -> ClaimedTensor:
        """Claim that ``elements`` are on the device."""
        with torch.inference_mode(False):  # one that may be looked at in and outside of that mode
            claimed: ClaimedTensor = Tensor._make_wrapper_subclass(
                cls,
                elements.size(),
                strides=elements.stride(),
                storage_offset=elements.storage_offset(),
                dtype=elements.dtype,
            )
        claimed.elements, claimed.owner = elements, owner
        return claimed

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator outside of the mode, as another thread may."""
        owner = next(leaf.owner for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ClaimedTensor))
        return owner.run(func, args, kwargs or {})

    # The answers that C++ gives for a tensor in host memory: a torch without CUDA has no devices to guard.

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it claims to lie."""
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True."""
        return True

    def data_ptr(self) -> int:
        """Return an unused address."""
        return self.elements.data_ptr()

    def tolist(self) -> Any:
        """Wait and return the elements."""
        return self.cpu().tolist()

    def cpu(self, *args: object, **kwargs: object) -> Tensor:
        """Wait and return a copy in host memory."""
        return self.to(_HOST)

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse, as a real one does."""
        raise DeviceMisuse("numpy sees no memory of a device")

    def __array__(self, *args: object, **kwargs: object) -> Any:
        raise DeviceMisuse("numpy sees no memory of a device")

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # type: ignore[override]
        """Copy ``data`` from pageable memory."""
        return torch.as_tensor(data, **{"dtype": None, **options}).to(DEVICE)


@dataclass(slots=True)
class _Copy:
    """A copy that the host has not waited for. To the host: ``target`` gets ``content`` then. From it: ``source`` equals it."""

    content: Tensor
    target: Tensor | None = None
    source: Tensor | None = None

    @torch.inference_mode()
    def end(self) -> None:
        if self.target is not None:
            self.target.copy_(self.content)
        elif self.source is not None and not torch.equal(self.source, self.content):
            raise DeviceMisuse("pinned memory has been changed before the device had read it")


class _Stream:
    """Copies in order. Operators are done when they are launched."""

    def __init__(self, owner: ClaimedCuda) -> None:
        self._owner = owner
        self.copies: list[_Copy] = []
        self.num_ended = 0

    def end_copies(self, until: int) -> None:
        while self.num_ended < until:
            self.num_ended += 1
            self.copies[self.num_ended - 1].end()

    def synchronize(self) -> None:
        self._owner.note_wait("a stream")
        self.end_copies(len(self.copies))

    def wait_stream(self, other: _Stream) -> None:
        """Do nothing: all work launched on the other stream is done."""


class _Event:
    def __init__(self, owner: ClaimedCuda) -> None:
        self._owner = owner
        self._stream: _Stream | None = None
        self._until = 0

    def record(self, stream: _Stream | None = None) -> None:
        self._stream = stream or self._owner.stream
        self._until = len(self._stream.copies)

    def synchronize(self) -> None:
        self._owner.note_wait("an event")
        assert self._stream is not None, "an event that was never recorded"
        self._stream.end_copies(self._until)


class _Graph:
    """A tape: operators with the tensors of their recording; ``results`` are None where the operator writes into these."""

    def __init__(self) -> None:
        self.tape: list[tuple[Callable[[], Any], list[Tensor] | None]] = []

    @torch.inference_mode()
    def replay(self) -> None:
        for call, results in self.tape:
            again = call()
            if results is not None:
                for old, new in zip(results, _tensors(again), strict=True):
                    old.copy_(new)


@dataclass
class ClaimedCuda:
    """One device. ``free`` and ``total`` are bytes of its memory, for callers that ask."""

    free: int = 8 << 30
    total: int = 8 << 30
    largest: int | None = None  # bytes of a tensor that still finds room; None = any
    num_replayable: int = 0  # graphs that have been recorded
    num_streams: int = 0  # that have been made
    _pinned: list[Tensor] = field(default_factory=list)  # kept, so that no other memory gets their addresses
    _addresses: set[int] = field(default_factory=set)
    _waits: list[str] | None = None
    _recording: _Graph | None = None

    def __post_init__(self) -> None:
        """Begin on the default stream."""
        self.stream = self._default = _Stream(self)
        self._mode = _Mode(self)

    @contextmanager
    def launching(self) -> Iterator[list[str]]:
        """Give the list of what the host waits for within the block, each with the line of code that asked for it."""
        outer, self._waits = self._waits, []
        try:
            yield self._waits
        finally:
            self._waits = outer

    @contextmanager
    def recording(self, graph: _Graph, **options: object) -> Iterator[None]:
        """Put all that is launched within the block on a tape (``torch.cuda.graph``)."""
        assert self._recording is None
        self._recording = graph
        try:
            yield
        finally:
            self._recording = None
        self.num_replayable += 1

    def kernel(self, function: Callable[..., Any], documented: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Return ``function``, written for host memory, as one operator of the device.

        ``documented``: it must take arguments as this one does; nothing else of it is checked.
        """

        def launched(*args: Any, **kwargs: Any) -> Any:
            if documented is not None:
                inspect.signature(documented).bind(*args, **kwargs)
            if any(not isinstance(tensor, ClaimedTensor) for tensor in _tensors((args, kwargs))):
                raise DeviceMisuse(f"{function.__name__} takes no tensor in host memory")
            inner_args, inner_kwargs = tree_map_only(ClaimedTensor, lambda claimed: claimed.elements, (args, kwargs))

            def call() -> Any:
                with _disable_current_modes():
                    return function(*inner_args, **inner_kwargs)

            return self._claim(self._execute(call, writes=False, inputs=()), {})

        return launched

    def note_wait(self, what: str) -> None:
        """Note that the host waits here.

        Raises: DeviceMisuse while a graph is recorded.
        """
        if self._recording is not None:
            raise DeviceMisuse(f"not permitted while a graph is recorded: {what}, at {_place()}")
        if self._waits is not None:
            self._waits.append(f"{what}, at {_place()}")

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of torch."""
        name = func.overloadpacket.__name__
        if name in _MADE_OF_OTHERS:
            with self._mode:
                return func.decompose(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        claimed = [tensor for tensor in tensors if isinstance(tensor, ClaimedTensor)]
        target = kwargs.get("device")
        is_here = bool(claimed) if target is None else torch.device(target).type == DEVICE.type
        if name in ("_to_copy", "copy_") and (claimed or is_here):
            copied = self._copied(name, args, kwargs, is_here)
            if copied is not None:
                return copied
        if not claimed and not is_here:
            return self._run_on_host(func, args, kwargs)
        self._check(func, name, args, tensors)
        known = {id(tensor.elements): tensor for tensor in claimed}
        inner_args, inner = tree_map_only(ClaimedTensor, lambda tensor: tensor.elements, (args, dict(kwargs)))
        inner.pop("pin_memory", None)
        if target is not None:
            inner["device"] = _HOST
        writes = func._schema.is_mutable
        results = self._execute(lambda: func(*inner_args, **inner), writes, [tensor.elements for tensor in claimed])
        return self._claim(results, known) if is_here else results

    def pin(self, host: Tensor) -> Tensor:
        """Return a copy in pinned memory (``Tensor.pin_memory``)."""
        if self._recording is not None:
            raise DeviceMisuse(f"not permitted while a graph is recorded: pinned memory, at {_place()}")
        pinned = host.clone(memory_format=torch.contiguous_format)
        self._pinned.append(pinned)
        self._addresses.add(_address(pinned))
        return pinned

    def _run_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_pinned = kwargs.get("pin_memory")
        result = func(*args, **{**kwargs, "pin_memory": False} if is_pinned else kwargs)
        if is_pinned:
            self._pinned.append(result)
            self._addresses.add(_address(result))
        return result

    def _check(self, func: Any, name: str, args: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        on_host = [tensor for tensor in tensors if not isinstance(tensor, ClaimedTensor)]
        takes_numbers = torch.Tag.pointwise in func.tags or name.startswith(("index_put", "_index_put"))
        if any(tensor.dim() or not takes_numbers for tensor in on_host):
            raise DeviceMisuse(f"{func} mixes tensors of the device and of the host, at {_place()}")
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1])
        )
        by_counts = name == "repeat_interleave" and len(tensors) > 0 and func._overloadname in ("Tensor", "self_Tensor")
        if name in _READ_BY_THE_HOST or by_mask or by_counts:
            self.note_wait(str(func))

    def _copied(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_here: bool) -> Any:
        """Copy from one side to the other; return None if both are one."""
        if name == "copy_":
            target, source = args[0], args[1]
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            if isinstance(target, ClaimedTensor) == isinstance(source, ClaimedTensor):
                return None
        else:
            source, non_blocking, target = args[0], kwargs.get("non_blocking", False), None
            if isinstance(source, ClaimedTensor) == is_here:
                return None
        if self._recording is not None:
            raise DeviceMisuse(f"not permitted while a graph is recorded: a copy from or to the host, at {_place()}")
        if isinstance(source, ClaimedTensor):
            return self._to_host(source.elements, target, non_blocking, kwargs)
        return self._from_host(source, target, non_blocking, kwargs)

    def _to_host(self, source: Tensor, target: Tensor | None, non_blocking: bool, kwargs: dict[str, Any]) -> Tensor:
        is_pinned = target is not None and _address(target) in self._addresses
        if target is None:
            target = torch.empty_like(source, dtype=kwargs.get("dtype") or source.dtype)
        content = source.to(target.dtype, copy=True)
        if non_blocking and is_pinned:
            target.view(-1).view(torch.uint8).fill_(_GARBAGE)
            self.stream.copies.append(_Copy(content, target=target))
            return target
        self.note_wait("a copy to the host")
        self.stream.end_copies(len(self.stream.copies))
        return target.copy_(content)

    def _from_host(
        self, source: Tensor, target: ClaimedTensor | None, non_blocking: bool, kwargs: dict[str, Any]
    ) -> ClaimedTensor:
        if non_blocking and _address(source) in self._addresses:
            self.stream.copies.append(_Copy(source.clone(), source=source))
        elif source.numel() and (source.dim() or target is None):  # a number is an argument of a kernel that fills
            self.note_wait("a copy from pageable memory")
        if target is None:
            return ClaimedTensor(source.to(kwargs.get("dtype") or source.dtype, copy=True), self)
        target.elements.copy_(source)
        return target

    def _execute(self, call: Callable[[], Any], writes: bool, inputs: Sequence[Tensor]) -> Any:
        results = call()
        if self.largest is not None and any(tensor.untyped_storage().nbytes() > self.largest for tensor in _tensors(results)):
            raise torch.OutOfMemoryError("CUDA out of memory, as the test wants it")
        if self._recording is not None:
            storages = {_address(tensor) for tensor in inputs}
            fresh = _tensors(results)
            if writes or not fresh:
                self._recording.tape.append((call, None))
            elif any(_address(tensor) not in storages for tensor in fresh):
                self._recording.tape.append((call, fresh))
        return results

    def _claim(self, results: Any, known: dict[int, ClaimedTensor]) -> Any:
        def claim(result: Tensor) -> ClaimedTensor:
            same = known.get(id(result))
            return ClaimedTensor(result, self) if same is None else same

        return tree_map_only(Tensor, claim, results)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Be torch's device within the block, on this thread."""
        plain_to = Tensor.to

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args and isinstance(args[0], Tensor):
                args = (args[0].device, args[0].dtype, *args[1:])
            device, args = _numbered(kwargs.pop("device", None)), tuple(map(_numbered, args))
            if device is None and args and isinstance(args[0], torch.device):
                device, args = args[0], args[1:]
            if device == _HOST and isinstance(tensor, ClaimedTensor):
                names = zip(("dtype", "non_blocking"), args, strict=False)
                options = {"device": device, **dict(names), **kwargs}
                copied: Tensor = self.run(torch.ops.aten._to_copy.default, (tensor,), options)
                return copied
            return plain_to(tensor, *args, **kwargs) if device is None else plain_to(tensor, device, *args, **kwargs)

        allocated = itertools.repeat(0)
        functions: dict[str, Callable[..., object]] = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "Stream": self._new_stream,
            "Event": lambda: _Event(self),
            "CUDAGraph": _Graph,
            "graph": self.recording,
            "graph_pool_handle": lambda: (0, 1),
            "default_stream": lambda device=None: self._default,
            "current_stream": lambda device=None: self.stream,
            "stream": self._on_stream,
            "device": lambda device: nullcontext(),
            "set_device": lambda device: None,
            "synchronize": lambda device=None: self.stream.synchronize(),
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device=None: None,
            "memory_allocated": lambda device=None: next(allocated),
            "max_memory_allocated": lambda device=None: 0,
            "memory_reserved": lambda device=None: 0,
            "set_per_process_memory_fraction": self._keep_within,
            "is_current_stream_capturing": lambda: self._recording is not None,
            "mem_get_info": lambda device=None: (self.free, self.total),
            "get_device_capability": lambda device=None: (9, 0),
        }
        with ExitStack() as stack:
            for name, function in functions.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, function))
            stack.enter_context(mock.patch.object(Tensor, "to", to))
            stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda host: self.pin(host)))  # noqa: PLW0108 - so that it is bound as a method
            stack.enter_context(mock.patch.object(Tensor, "is_pinned", lambda host: _address(host) in self._addresses))
            stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
            torch._C._set_only_lift_cpu_tensors(True)  # so that ``torch.tensor`` shows its copy to the device
            stack.enter_context(self._mode)
            yield

    def _new_stream(self, device: torch.device | None = None) -> _Stream:
        self.num_streams += 1
        return _Stream(self)

    def _keep_within(self, share: float) -> None:
        self.largest = None if share == 1.0 else int(share * self.total)

    @contextmanager
    def _on_stream(self, stream: _Stream) -> Iterator[None]:
        outer, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = outer


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows the device every operator, those that make tensors out of nothing too."""

    def __init__(self, owner: ClaimedCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._owner.run(func, args, kwargs or {})


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _numbered(argument: Any) -> Any:
    """Return a device with its number: a torch without CUDA cannot say which one is current."""
    if isinstance(argument, str):
        argument = torch.device(argument)
    return DEVICE if isinstance(argument, torch.device) and argument.type == DEVICE.type else argument


def _place() -> str:
    """Return the line of the innermost code that is neither torch's nor this file's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
