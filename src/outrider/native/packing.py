"""A native library: loading it, and the functions that pack weights into models."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError
from ..limits import LARGEST_INT
from .checks import at, expect, int32s, refused, wide_bias, within
from .interface import (
    ABI,
    DTYPES,
    FUNCTIONS,
    MATRICES,
    VECTORS,
    Config,
    QuantizedData,
)


class PackingCalls:
    """The part of a library's functions that makes models; its pool starts with the first.

    Args:
        isa: one of ``ISAS``.
        file: where it is.

    Raises:
        OSError: it cannot be loaded, or was built from other sources.
    """

    def __init__(self, isa: str, file: Path) -> None:
        self.isa = isa
        self._c = loaded = ctypes.CDLL(str(file))
        try:
            if loaded.outrider_abi() != ABI:
                raise OSError(f"{file} was built from other sources; install Outrider again")
            for name, (result, arguments) in FUNCTIONS.items():
                function = getattr(loaded, f"outrider_{name}")
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise OSError(f"{file} was built from other sources ({error})") from None

    def sets(self) -> int:
        """Return which of ``ISAS`` this CPU can run, a bit each, the first in the lowest bit."""
        return int(self._c.outrider_cpu())

    @property
    def nanoseconds(self) -> int:
        """Time that this process has spent in the library's calls, ns."""
        return int(self._c.outrider_spent())

    def _run(self, function: Any, *arguments: Any) -> None:
        try:
            wrong = function(*arguments)
        except ctypes.ArgumentError as error:
            raise refused(error) from None
        if wrong is not None:
            raise ModelError(f"the native step refused its input: {wrong.decode()}.")

    def _made(self, function: Any, *arguments: Any) -> int:
        """Return the object or number that a function writes to its last argument."""
        made = ctypes.c_int64()
        self._run(function, *arguments, ctypes.byref(made))
        return made.value

    def start(self, threads: int) -> int:
        """Start the pool, at the first call only.

        Returns:
            How many threads it has: fewer than asked for where the system starts no more.
        """
        return int(self._c.outrider_start(within("threads", threads, 1, LARGEST_INT)))

    def new_model(self, config: Config, embedding: torch.Tensor | None) -> int:
        """Return a model without weights; ``embedding`` [embeddings, hidden] must outlive it.

        None where embeddings are tied: tokens are looked up in the head.
        """
        if embedding is not None:
            dtype = next((d for d, number in DTYPES.items() if number == config.dtype), None)
            expect(embedding, (config.embeddings or config.vocabulary, config.hidden), dtype)
        rows = None if embedding is None else embedding.data_ptr()
        return self._made(self._c.outrider_model, ctypes.byref(config), rows)

    def free(self, kind: str, handle: int) -> None:
        """Give the memory of a model, store or pipeline back, once nothing uses it any more."""
        getattr(self._c, f"outrider_{kind}_free")(handle)

    def set_matrix(
        self,
        model: int,
        layer: int,
        kind: str,
        data: torch.Tensor,
        bias: torch.Tensor | None,
        beside: int | None = None,
    ) -> None:
        """Pack ``data`` [out, in], in the model's dtype, with ``bias`` [out].

        A head or embedding that is the same to the bit in the model ``beside`` is held once; either
        model may be freed first.

        Raises:
            ModelError: shape or dtype are not the model's.
        """
        expect(data, tuple(data.shape[:2]), data.dtype if data.dtype in DTYPES else None)
        wide = wide_bias(bias, data.shape[0])
        self._run(
            self._c.outrider_matrix,
            model,
            layer,
            MATRICES[kind],
            data.data_ptr(),
            DTYPES[data.dtype],
            None if wide is None else wide.data_ptr(),
            *data.shape,
            beside,
        )

    def set_quantized(
        self,
        model: int,
        layer: int,
        kind: str,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bits: int,
        group: int,
        bias: torch.Tensor | None,
        beside: int | None = None,
    ) -> None:
        """Pack a quantised matrix in place of one of the model's dtype, see ``set_matrix``.

        The parts are those of ``models.quantize.Quantized``, ``codes`` [out, in]. Scales are kept
        as fp16 times one power of two, which is exact for what was fp16 or bf16 and within 2^28 of
        the largest.

        Raises:
            ModelError: shapes or dtypes do not fit together, a scale is not finite, or a code or
                zero has more bits than ``bits``.
        """
        out, width = codes.shape
        groups = -(-width // max(1, group))
        codes, scales = codes.contiguous(), scales.contiguous()
        expect(codes, (out, width), torch.uint8)
        expect(scales, (out, groups), torch.float32)
        if zeros is not None:
            zeros = zeros.contiguous()
            expect(zeros, (out, groups), torch.uint8)
        wide = wide_bias(bias, out)
        given = QuantizedData(
            codes=codes.data_ptr(),
            scales=scales.data_ptr(),
            zeros=None if zeros is None else zeros.data_ptr(),
            bits=bits,
            group=group,
            groups=groups,
        )
        self._run(
            self._c.outrider_quantized,
            model,
            layer,
            MATRICES[kind],
            ctypes.byref(given),
            None if wide is None else wide.data_ptr(),
            out,
            width,
            beside,
        )

    def set_ids(self, model: int, targets: Sequence[int], inputs: Sequence[int]) -> None:
        """Say which ids of the target a model's ids are, and which are looked up for the target's.

        -1 stands for none; an empty ``inputs`` for the same ids.
        """
        theirs, ours = int32s("token ids", targets), int32s("token ids", inputs)
        self._run(self._c.outrider_ids, model, at(theirs), len(theirs), at(ours), len(ours))

    def borrow(self, model: int, beside: int) -> None:
        """Let a model look tokens up where the model ``beside`` does, whose embedding stays.

        Medusa's heads take its last norm instead.
        """
        self._run(self._c.outrider_borrow, model, beside)

    def set_vector(self, model: int, number: int, kind: str, data: torch.Tensor) -> None:
        """Keep ``data``, a norm's weight of layer ``number``; the model's own has number 0."""
        wide = data.float().contiguous()
        place, size = VECTORS[kind], wide.numel()
        self._run(self._c.outrider_vector, model, number, place, wide.data_ptr(), size)

    def set_rotary(self, model: int, table: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Keep a rotary table, fp32 [positions, head_dim / 2] each; a longer one may follow."""
        for half in (cos, sin):
            expect(half, tuple(cos.shape[:2]), torch.float32)
        places = cos.data_ptr(), sin.data_ptr()
        self._run(self._c.outrider_rotary, model, table, *places, *cos.shape)

    def set_layer(self, model: int, layer: int, window: int | None, table: int) -> None:
        """Say how many positions a layer's rows see, and which rotary table is theirs."""
        self._run(self._c.outrider_layer, model, layer, window or 0, table)

    def check(self, model: int) -> None:
        """Raise unless the model has all its weights."""
        self._run(self._c.outrider_check, model)

    def shared(self, model: int, beside: int) -> int:
        """Return the bytes of head and packed embedding that both models share."""
        return int(self._c.outrider_shared(model, beside))

    def weight_bytes(self, model: int, beside: int | None) -> int:
        """Return the bytes of a model's matrices, without those that ``beside`` holds too."""
        return int(self._c.outrider_weights(model, beside))

    def page_bytes(self, model: int, page_size: int) -> int:
        """Return the bytes of cache that a page takes."""
        return self._made(self._c.outrider_page_bytes, model, page_size)
