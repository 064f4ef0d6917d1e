"""What `analysis` raises for a mistake of the user's: one message, exit code 2, nothing written."""


class InputError(ValueError):
    """The user gave something that cannot be worked with; the message says what, and what to do."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says anything, or the error's kind where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
