"""/v1/models: the base models that the operator has named."""

from fastapi import APIRouter

from api.schemas import ListAnswer, ModelAnswer
from store import base_models

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
def list_models() -> ListAnswer[ModelAnswer]:
    return ListAnswer.of([ModelAnswer.of(model) for model in base_models.list_models()], has_more=False)


@router.get("/{model:path}")
def get_model(model: str) -> ModelAnswer:
    return ModelAnswer.of(base_models.get_model(model))
