"""What `hooks` raises when it would otherwise have to guess."""


class UnsupportedAttention(NotImplementedError):
    """The model's attention cannot be captured exactly; the message names the class, the reason and what works."""


class ModelUnavailable(OSError):
    """A model or its tokenizer cannot be found or loaded here; the message names the one command that mends it."""
