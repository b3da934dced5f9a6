"""The job of the settings that a search found best."""

from __future__ import annotations

from tiledseg.planning.answer.search import memory_keys
from tiledseg.planning.jobs.job import Job, job_of, shell_word
from tiledseg.planning.jobs.site import Site
from tiledseg.planning.question import Question
from tiledseg.planning.search.price import Priced


def searched_job(question: Question, images_per_step: int, priced: Priced, site: Site, minutes: int) -> Job:
    """A job of the winner on the GPUs that it keeps busy."""
    candidate = priced.candidate
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
    what = f", {images_per_step} images a step: {priced.in_words}."
    return job_of(priced.ranks, question, site, minutes, flags, what)
