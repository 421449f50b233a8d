"""The few calls of the API that the demo makes, in plain HTTP: what any client in any language would do."""

from pathlib import Path
from typing import Any

import httpx

from training.errors import BurnishError, Fault

FINAL = ("succeeded", "failed", "cancelled")


class ApiError(BurnishError):
    """What the service answered instead."""

    code = "api_error"
    fault: Fault = "config"


class Client:
    def __init__(self, url: str, key: str) -> None:
        # Not through a proxy: the service is on this machine.
        self._http = httpx.Client(
            base_url=f"{url}/v1", headers={"Authorization": f"Bearer {key}"}, timeout=30, trust_env=False
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def upload(self, path: Path) -> str:
        with path.open("rb") as file:
            return str(self._call("POST", "/files", data={"purpose": "fine-tune"}, files={"file": file})["id"])

    def create_job(self, body: dict[str, Any]) -> str:
        return str(self._call("POST", "/fine_tuning/jobs", json=body)["id"])

    def get_job(self, job_id: str) -> dict[str, Any]:
        return self._call("GET", f"/fine_tuning/jobs/{job_id}")

    def get_curve(self, job_id: str) -> dict[str, list[Any]]:
        """Columns of one length: `step`, `train_loss`, `tokens_per_s` ..."""
        columns: dict[str, list[Any]] = self._call("GET", f"/fine_tuning/jobs/{job_id}/metrics")["columns"]
        return columns

    def cancel_unfinished(self) -> None:
        for job in self._call("GET", "/fine_tuning/jobs", params={"limit": 100})["data"]:
            if job["status"] not in FINAL:
                self._call("POST", f"/fine_tuning/jobs/{job['id']}/cancel")

    def download_adapter(self, job_id: str, target: Path) -> None:
        with self._http.stream("GET", f"/fine_tuning/jobs/{job_id}/adapter", params={"format": "zip"}) as answer:
            if answer.is_error:
                answer.read()
            _check(answer)
            with target.open("wb") as file:
                for part in answer.iter_bytes():
                    file.write(part)

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError as bad:
            raise ApiError(f"{method} {path}: the service does not answer ({bad!r})") from bad
        _check(answer)
        body: dict[str, Any] = answer.json()
        return body


def is_ready(url: str) -> bool:
    """Whether a service answers and reaches its database and broker."""
    try:
        return httpx.get(f"{url}/readyz", timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _check(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:500]
    raise ApiError(f"{answer.request.method} {answer.request.url.path}: {answer.status_code}, {message}")
