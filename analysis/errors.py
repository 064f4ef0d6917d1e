"""What `analysis` raises for a mistake of the user's: one message, exit code 2, nothing written."""


class InputError(ValueError):
    """The user gave something that cannot be worked with; the message says what, and what to do."""
