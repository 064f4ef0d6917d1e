"""The type checker of the tests: beartype, taking an int where a float is asked for, as Python's typing does."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
