"""The job of the settings that a search found best."""

from __future__ import annotations

from tiledseg.planning.answer.search import memory_keys
from tiledseg.planning.jobs.job import Job, shell_word
from tiledseg.planning.jobs.site import Site
from tiledseg.planning.question import Question
from tiledseg.planning.search.price import Priced


def searched_job(question: Question, images_per_step: int, priced: Priced, site: Site, minutes: int) -> Job:
    """A job of the winner on the GPUs that it keeps busy."""
    candidate, per_node = priced.candidate, site.gpus or question.gpus_per_node
    flags = [f"--tiling.grid {shell_word(candidate.grid)}"]
    flags += [f"--parallel.{key} {shell_word(value)}" for key, value in candidate.keys(priced.plan).items()]
    if question.precision != "fp32":
        flags.append(f"--train.precision {question.precision}")
    kept = memory_keys(question, priced)
    flags += [f"--memory.{key} {shell_word(value)}" for key, value in kept.items()]
    flags += ['--memory.store "$local"'] if kept and "store" not in kept else []
    if priced.plan.rebuilt is not None:
        flags.append(f"--memory.budget {priced.limit}")
    flags += ["--train.tiles_per_step null", f"--train.images_per_step {images_per_step}"]
    ranks = priced.ranks
    nodes = -(-ranks // per_node)
    title = f"Trains on {ranks} GPUs, {nodes} nodes of {per_node}, {images_per_step} images a step: {priced.in_words}."
    return Job(ranks, min(per_node, ranks), minutes, tuple(flags), title)
