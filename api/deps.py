"""What routes are given: the project of the key, a page to turn to, a parsed body."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.bodies import read_json
from api.errors import AuthenticationError
from store.errors import InvalidRequestError
from store.keys import find_project_of
from store.session import open_session

PUBLIC_PATHS = frozenset({"/healthz", "/readyz"})
"""Routes that answer without a key, beside /openapi.json. Every other route asks for one."""

MAX_PAGE = 100

_bearer = HTTPBearer(auto_error=False, description="A key of this service: bk-...")


def authenticate(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]
) -> None:
    """Stands before every route. Decides by the route that was found, never by the text of the URL.

    Raises:
        AuthenticationError: no key, or a wrong or revoked one.
    """
    if request.scope["route"].path in PUBLIC_PATHS:
        return
    if credentials is None:
        message = "no API key: send the header Authorization: Bearer <key>"
        raise AuthenticationError(message, code="missing_api_key")
    with open_session() as session:
        project_id = find_project_of(session, credentials.credentials)
    if project_id is None:
        raise AuthenticationError("this API key is wrong or was revoked")
    request.state.project_id = project_id


def refuse_nul(request: Request) -> None:
    """The database cannot even be asked for a text with a NUL character."""
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise InvalidRequestError("a NUL character (%00) in the URL; take it out")


def get_project(request: Request) -> str:
    project_id: str = request.state.project_id
    return project_id


@dataclass(frozen=True)
class PageQuery:
    """Where a page of a listing begins, behind the item `after`, and how many items it holds."""

    after: str | None
    limit: int


def read_page_query(after: str | None = None, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20) -> PageQuery:
    return PageQuery(after, limit)


ProjectId = Annotated[str, Depends(get_project)]
Paging = Annotated[PageQuery, Depends(read_page_query)]
JsonBody = Annotated[object, Depends(read_json)]
