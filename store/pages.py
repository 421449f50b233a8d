"""Pages of a listing, as a client with a cursor turns them."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Select
from sqlalchemy.orm import Session

T = TypeVar("T")


@dataclass(frozen=True)
class Page(Generic[T]):
    items: list[T]
    has_more: bool


def read_page(session: Session, query: Select[Any], limit: int) -> Page[Any]:
    """The first `limit` rows of an ordered query, and whether there are more."""
    found = list(session.scalars(query.limit(limit + 1)))
    return Page(found[:limit], has_more=len(found) > limit)
