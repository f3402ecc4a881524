"""Parts of made-up runs: requests of random sizes, and what the ranks of all replicas leave of them."""

from __future__ import annotations

import os

import numpy as np

from mpillm.formats.hdf5_schema import RANKS
from mpillm.formats.part_records import STEP_ROWS
from mpillm.formats.parts import RankPart, RequestsPart, SequenceRecord

HEADER = {"mpillm_version": "0.1.0", "config": {"tp": 3, "text": "é\0"}, "versions": {"python": "3.11"},
          "layout": {"tp": 3, "dp": 2, "idle": 0}, "model": {"hidden": 8}}
VOCAB = 50
# The columns of the ranks of each replica
SLICES = {0: ((0, 16), (16, 48), (48, 50)), 1: ((0, 48), (48, 48), (48, 50)), 2: ((0, 50),)}
FAILED = [(1, 5, None, 400, "no prompt\0"), (7, 23, "doubled\ud83d", 404, "…")]     # index, line, id, status, error


def make_request(random: np.random.Generator, index: int, replica: int, *, logits: bool = False) -> dict:
    """The arguments of one RequestsPart.add, of random sizes; lines are 2, 5, 8 ..."""
    n, items = int(random.integers(1, 4)), int(random.integers(1, 3))
    prompts = [random.integers(0, VOCAB, random.integers(1, 9)).tolist() for _ in range(items)]
    scored = random.random() < 0.5
    choices = []
    for choice in range(n * items):
        count = int(random.integers(0, 7))
        logprobs = [-np.inf if random.random() < 0.1 else -float(random.random()) for _ in range(count)]
        top = [[(int(random.integers(VOCAB)), -float(random.random())) for _ in range(random.integers(0, 4))]
               for _ in range(count)]
        choices.append(SequenceRecord(
            item=choice // n, sample=choice % n, choice=choice, seed=2**64 - 1 - choice,
            token_ids=random.integers(0, VOCAB, count).tolist(), logprobs=logprobs,
            text=f"é {index}/{choice}", finish_reason="stop", stop_reason=[None, 7, "7", "\n"][choice % 4],
            top=top if random.random() < 0.5 else None, queue_s=index + 0.5, prefill_s=0.1, first_token_s=0.2,
            decode_s=0.3))
    random.shuffle(choices)
    scores = [None if random.random() < 0.2 else [None] + [-0.5 * i for i in range(1, len(ids))]
              for ids in prompts]
    prompt_top = [[None] + [[(i, -1.0), (i + 1, -2.0)] for i in range(1, len(ids))] for ids in prompts]
    return dict(index=index, line=3 * index + 2, custom_id=f"id-{index}", replica=replica, tp=len(SLICES[replica]),
                prompts=prompts, choices=choices, prompt_logprobs=scores if scored else None,
                prompt_top=prompt_top if scored else None, result={"line": 3 * index + 2, "replica": replica},
                logits_rows=sum(len(choice.token_ids) for choice in choices) if logits else 0)


def logit(index: int, choice: int, position: int) -> np.ndarray:
    """The whole row of one key: every value is its own."""
    row = np.arange(VOCAB) / 64 + index - 8 * choice + position * 16
    row[(index + position) % VOCAB] = -np.inf
    return row.astype(np.float32)


def logits_keys(requests: list[dict], random: np.random.Generator) -> np.ndarray:
    """Keys of rows for all generated tokens, interleaved as a batch does, some computed twice."""
    keys = [(request["index"], choice.choice, len(request["prompts"][choice.item]) - 1 + step, 0)
            for request in requests for choice in request["choices"] for step in range(len(choice.token_ids))]
    keys += keys[:3]
    random.shuffle(keys)
    return np.array(keys, np.int64).reshape(-1, 4)


def rank_row(rank: int, replica: int = 0, tp_rank: int = 0) -> dict:
    owned = {f"{name}_{end}": 1 for name in ("head", "kv_head", "column", "expert", "vocab")
             for end in ("start", "stop")}
    row = dict(rank=rank, host="näme", replica=replica, tp_rank=tp_rank, cores="0-3", numa="0", threads=2,
               weight_bytes=10**11, kv_bytes_per_token=64, **owned)
    assert {*row, "attempt"} == set(RANKS.names)
    return row


def add_logits(part: RankPart, keys: np.ndarray, low: int, high: int) -> None:
    """The columns of these keys, in a few batches."""
    for batch in np.array_split(keys, 5):
        rows = np.array([logit(*key[:3]) for key in batch], np.float32).reshape(-1, VOCAB)
        part.add_logits(batch, rows[:, low:high])


def steps(*rows: tuple[int, int, float, float, float]) -> np.ndarray:
    """Steps of a rank: prompt rows, decode rows, total, communication and waited seconds."""
    table = np.zeros(len(rows), STEP_ROWS)
    for at, row in enumerate(rows):
        table[at] = (0, *row[:2], at + 0.5, *row[2:])
    return table


def write_parts(folder: str, requests: list[dict], dtype: str | None = "f16", attempt: int = 0,
                failed=()) -> None:
    """What the ranks of all replicas leave: requests in random order, logits in slices, two steps a rank."""
    random, rank = np.random.default_rng(0), 0
    for replica, slices in SLICES.items():
        mine = [request for request in requests if request["replica"] == replica]
        random.shuffle(mine)
        with RequestsPart(folder, attempt, replica, 1e9) as part:
            for index, line, custom_id, status, error in failed if replica == 0 else ():
                part.add(index=index, line=line, custom_id=custom_id, status=status, error=error, replica=-1, tp=0,
                         result={"line": line, "error": error})
            for number, request in enumerate(mine):
                part.add(**request)
                if number % 3 == 0:
                    part.flush()
        keys = logits_keys(mine, random)
        for tp_rank, (low, high) in enumerate(slices):
            with RankPart(folder, attempt, rank, replica, tp_rank, 1e9,
                          logits=None if dtype is None else (low, high, dtype)) as part:
                part.describe(rank_row(rank, replica, tp_rank))
                part.add_steps(steps((5, 0, 0.5, 0.25, 0.0)))
                if dtype is not None:
                    add_logits(part, keys, low, high)
                part.add_steps(steps((0, 1, 0.5, 0.125, 0.0)))
            rank += 1


def names(folder: str) -> list[str]:
    return sorted(os.listdir(folder))
