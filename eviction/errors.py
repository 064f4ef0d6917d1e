"""What `eviction` raises for a decision that cannot be taken."""


class BudgetError(ValueError):
    """The budget leaves no room for what is always kept, or is no budget; the message gives the numbers that would do."""
