"""Mutations that change nothing: the last resort, each with the reason why no test can see it."""

from tests.mutation.listing import Key

EQUIVALENT: dict[Key, str] = {}
