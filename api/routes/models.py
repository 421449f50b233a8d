"""/v1/models: the base models that the operator has named."""

from fastapi import APIRouter

from api.schemas import ListAnswer, ModelAnswer
from store import base_models
from store.errors import NotFoundError

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
def list_models() -> ListAnswer[ModelAnswer]:
    return ListAnswer.of([ModelAnswer.of(model) for model in base_models.list_models()], has_more=False)


@router.get("/{model:path}")
def get_model(model: str) -> ModelAnswer:
    if not model:
        message = "no name stands behind /v1/models/; GET /v1/models lists the models"
        raise NotFoundError(message, param="model", code="model_not_found")
    return ModelAnswer.of(base_models.get_model(model))
