"""What a check of preflight returns: a sentence for what a person must mend, the TryAgain itself for what may pass.

Decision: only a fault that may pass keeps its type. Whether a start ends with 75, which a managed job tries again, or
with 78, where it stops for good, hangs on nothing else.
"""

from jobs.errors import JobError, TryAgain

Problem = str | TryAgain


def problem_of(error: JobError) -> Problem:
    return error if isinstance(error, TryAgain) else error.sentence()


def sentence_of(problem: Problem) -> str:
    return problem.sentence() if isinstance(problem, TryAgain) else problem
