"""The running requests as arrays, and from them the input of one step.

Owns the runner's copy of token ids, block tables and lengths: dense rows, one per request, that live as long as the request
does, so that a step copies only what changed. Does not know the model, the scheduler's reasons, or how tokens are chosen.

A request at row r, with n scheduled tokens in this step:

    token_ids[r]   | computed ............ | scheduled (n) | known, later |
                   0              num_computed[r]          ^          num_tokens[r]
                                                    seq_len of the step; samples if it equals num_tokens[r]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.attention.base import AttentionBatch
from core.engine.sampling_state import SamplingRows, build_edits
from core.kv.spec import KVCacheConfig, ceil_div
from core.request import NewRequestData

IntArray = npt.NDArray[np.int64]


class BlockTable:
    """Block ids of all rows of one KV cache group, ``[max_num_seqs, max_blocks]`` int32."""

    def __init__(self, block_size: int, max_num_seqs: int, max_model_len: int) -> None:
        self.block_size = block_size
        self.block_ids = np.zeros((max_num_seqs, ceil_div(max_model_len, block_size)), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    def put(self, row: int, block_ids: Sequence[int]) -> None:
        """Replace a row."""
        self.num_blocks[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Append to a row."""
        start = int(self.num_blocks[row])
        end = start + len(block_ids)
        self.block_ids[row, start:end] = block_ids
        self.num_blocks[row] = end

    def move(self, source: int, target: int) -> None:
        """Move a row."""
        count = self.num_blocks[source]
        self.block_ids[target, :count] = self.block_ids[source, :count]
        self.num_blocks[target] = count


@dataclass(slots=True)
class StepInputs:
    """One step's input, sequences in scheduling order.

    rows: ``[num_seqs]`` into the batch. input_ids, positions: int32 and int64 ``[num_tokens]``. batches: one per KV cache
    group. samples: the sequences whose last token is computed here. fresh_partial_blocks: blocks that this step is the first to
    write and does not fill. unknown: the tokens that only the device knows: the newest step chooses them, as its samples
    ``sampled_slots``.
    """

    request_ids: list[str]
    rows: IntArray
    input_ids: npt.NDArray[np.int32]
    positions: IntArray
    batches: list[AttentionBatch]
    samples: IntArray
    fresh_partial_blocks: list[int]
    unknown: IntArray
    sampled_slots: IntArray


@dataclass(frozen=True, slots=True)
class Promised:
    """Tokens that a step chooses and that are counted already, by request, with the place of each.

    ``tenures`` tell a request from an earlier stay of the same in the batch.
    """

    request_ids: list[str]
    tenures: IntArray
    positions: IntArray


class InputBatch:
    """All requests that the runner holds."""

    def __init__(self, config: KVCacheConfig, max_num_seqs: int, max_model_len: int) -> None:
        self.request_ids: list[str] = []
        self.sampling = SamplingRows(max_num_seqs)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)  # untouched pages cost no memory
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)  # with the placeholders
        self.num_known = np.zeros(max_num_seqs, dtype=np.int64)
        self._sampled_slots = np.zeros(max_num_seqs, dtype=np.int64)  # of the promised token, in the newest step that chose one
        self._tenures = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_tenures = 0
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_tables = [BlockTable(group.spec.block_size, max_num_seqs, max_model_len) for group in config.groups]
        self._row_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.request_ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def add(self, new: NewRequestData) -> None:
        """Take a request, or replace the state of one that resumes."""
        row = self._row_of.get(new.request_id)
        if row is None:
            row = self._row_of[new.request_id] = len(self.request_ids)
            self.request_ids.append(new.request_id)
        count = len(new.token_ids)
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = self.num_known[row] = count
        self.num_computed[row] = new.num_computed_tokens
        self._num_tenures += 1
        self._tenures[row] = self._num_tenures
        for table, block_ids in zip(self.block_tables, new.block_ids, strict=True):
            table.put(row, block_ids)
        prompt, output = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
        edits = build_edits(new.sampling, new.stop_token_ids, prompt, output, new.grammar)
        self.sampling.put(row, new.sampling, new.choice_index, len(output), edits)

    def remove(self, request_id: str) -> None:
        """Forget a request; the last row moves into the hole. Unknown ids are ignored: not every request got here."""
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        last = len(self.request_ids) - 1
        last_id = self.request_ids.pop()
        if row != last:
            self._move(last, row)
            self.request_ids[row] = last_id
            self._row_of[last_id] = row
        self.sampling.clear(last)

    def advance(
        self,
        request_ids: Sequence[str],
        num_computed_tokens: Sequence[int],
        new_block_ids: Sequence[tuple[list[int], ...] | None],
    ) -> None:
        """Apply what the scheduler says about requests that are already here."""
        if not request_ids:
            return
        row_of = self._row_of
        self.num_computed[[row_of[request_id] for request_id in request_ids]] = num_computed_tokens
        for request_id, new_blocks in zip(request_ids, new_block_ids, strict=True):
            if new_blocks is not None:
                for table, block_ids in zip(self.block_tables, new_blocks, strict=True):
                    table.append(row_of[request_id], block_ids)

    def promise(self, rows: IntArray) -> Promised:
        """Count one more token per row, chosen by the step that is being launched; ``rows`` are distinct, in its order."""
        positions = self.num_tokens[rows]
        self.num_tokens[rows] += 1
        self._sampled_slots[rows] = np.arange(len(rows))
        self.sampling.advance(rows)
        request_ids = [self.request_ids[row] for row in rows.tolist()]
        return Promised(request_ids, self._tenures[rows], positions)

    def keep(self, promised: Promised, token_ids: Sequence[int]) -> None:
        """Fill in promised tokens, but of requests that have left. A token past the longest length is never fed back."""
        rows = np.array([self._row_of.get(request_id, -1) for request_id in promised.request_ids], dtype=np.int64)
        kept = np.flatnonzero((rows >= 0) & (self._tenures[rows] == promised.tenures))
        rows, positions, tokens = rows[kept], promised.positions[kept], np.asarray(token_ids)[kept]
        fits = positions < self.token_ids.shape[1]
        self.token_ids[rows[fits], positions[fits]] = tokens[fits]
        self.num_known[rows] = positions + 1
        for slot in np.flatnonzero(self.sampling.has_edits[rows]).tolist():
            self.sampling.append(int(rows[slot]), int(tokens[slot]))

    def prepare(self, num_scheduled_tokens: Mapping[str, int]) -> StepInputs:
        """Build the input of a step that computes at least one token."""
        request_ids = list(num_scheduled_tokens)
        row_of = self._row_of
        rows = np.array([row_of[request_id] for request_id in request_ids], dtype=np.int64)
        lengths = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(request_ids))
        starts = self.num_computed[rows]
        ends = starts + lengths
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start_loc[1:])
        token_rows, positions = _token_places(rows, starts, lengths, query_start_loc)
        seq_lens = ends.astype(np.int32)
        longest = int(ends.max())
        is_whole = len(rows) == len(self) and bool((rows == np.arange(len(rows))).all())
        batches = []
        for group_id, table in enumerate(self.block_tables):
            width = ceil_div(longest, table.block_size)
            tables = table.block_ids[: len(rows), :width] if is_whole else table.block_ids[rows, :width]
            slots = _slots(table, token_rows, positions)
            assert int(slots.min()) >= table.block_size, "a token without a block of its own: block 0 is the null block"
            batches.append(AttentionBatch(query_start_loc, seq_lens, tables, slots, group_id))
        unknown = np.flatnonzero(positions >= self.num_known[token_rows])
        return StepInputs(
            request_ids=request_ids,
            rows=rows,
            input_ids=self.token_ids[token_rows, positions],
            positions=positions,
            batches=batches,
            samples=np.flatnonzero(ends == self.num_tokens[rows]),
            fresh_partial_blocks=self._fresh_partial_blocks(rows, starts, ends),
            unknown=unknown,
            sampled_slots=self._sampled_slots[token_rows[unknown]],
        )

    def _fresh_partial_blocks(self, rows: IntArray, starts: IntArray, ends: IntArray) -> list[int]:
        """Return the last block of each sequence that begins in this step and is not filled by it.

        | full | full | last    .... |        last // block_size * block_size >= start, end % block_size != 0
                  start ^    ^ end
        """
        found: list[int] = []
        for table in self.block_tables:
            last = (ends - 1) // table.block_size
            is_fresh = (last * table.block_size >= starts) & (ends % table.block_size != 0)
            if is_fresh.any():
                found += table.block_ids[rows[is_fresh], last[is_fresh]].tolist()
        return found

    def _move(self, source: int, target: int) -> None:
        count = min(int(self.num_tokens[source]), self.token_ids.shape[1])
        self.token_ids[target, :count] = self.token_ids[source, :count]
        self.num_tokens[target] = self.num_tokens[source]
        self.num_computed[target] = self.num_computed[source]
        for column in (self.num_known, self._sampled_slots, self._tenures):
            column[target] = column[source]
        for table in self.block_tables:
            table.move(source, target)
        self.sampling.move(source, target)


def _token_places(
    rows: IntArray, starts: IntArray, lengths: IntArray, query_start_loc: npt.NDArray[np.int32]
) -> tuple[IntArray, IntArray]:
    """Return row and position of every token of the step."""
    num_tokens = int(query_start_loc[-1])
    if num_tokens == len(rows):  # one token each: pure decode
        return rows, starts
    offsets = np.arange(num_tokens, dtype=np.int64) - np.repeat(query_start_loc[:-1], lengths)
    return np.repeat(rows, lengths), np.repeat(starts, lengths) + offsets


def _slots(table: BlockTable, token_rows: IntArray, positions: IntArray) -> IntArray:
    """Return ``block_id * block_size + offset`` of every token."""
    blocks, offsets = np.divmod(positions, table.block_size)
    slots: IntArray = table.block_ids[token_rows, blocks].astype(np.int64) * table.block_size + offsets
    return slots
