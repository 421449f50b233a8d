"""The OpenAPI document describes what clients send and get, also what routes read by themselves."""

from typing import Any

import httpx

from api.deps import PUBLIC_PATHS
from training.spec import JobSpec


def list_references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(list_references, value.values()))
    return set().union(*map(list_references, value)) if isinstance(value, list) else set()


def test_the_document_describes_bodies_errors_and_keys(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json", trust_env=False).json()
    schemas = document["components"]["schemas"]
    assert {f"#/components/schemas/{name}" for name in schemas} >= list_references(document)
    create = document["paths"]["/v1/fine_tuning/jobs"]["post"]
    assert create["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/JobSpec"}
    assert set(schemas["JobSpec"]["properties"]) == set(JobSpec.model_fields)
    upload = document["paths"]["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert upload["required"] == ["file", "purpose"]
    assert set(schemas["ErrorBody"]["required"]) == {"message", "type", "param", "code"}
    for path, item in document["paths"].items():
        for operation in item.values():
            assert "422" not in operation["responses"] and "4XX" in operation["responses"], path
            assert operation.get("security") == (None if path in PUBLIC_PATHS else [{"HTTPBearer": []}]), path
