"""Every setting of the service, read from `BURNISH_*` variables; docs/settings.md is made from this class."""

import socket
from functools import cache
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="BURNISH_", frozen=True)

    database_url: str = Field(default="", description="PostgreSQL, as postgresql://user:password@host:5432/name")
    broker_url: str = Field(default="", description="Valkey or Redis, as redis://host:6379/0; switch its AOF on")
    data_dir: Path = Field(
        default=Path(".burnish"), description="Folder of this host: run directories, caches, embedded servers, the key"
    )
    artifacts_url: str = Field(
        default="",
        description="Object store of files and artifacts (file://, s3://, gs://, az://); default: DATA_DIR/artifacts",
    )
    models: Path | None = Field(
        default=None, description="JSON or YAML file: model name -> folder, GGUF file or hub id"
    )
    allow_hub: bool = Field(default=False, description="Whether jobs may name any model of the hub as org/name")
    model_cache: Path | None = Field(
        default=None, description="Where converted GGUF models are kept; default: user cache"
    )
    host_name: str = Field(default_factory=socket.gethostname, description="Name of this worker host; unique")
    cpu_slots: int = Field(default=1, ge=1, description="Jobs at a time on a host without a GPU")
    max_upload_bytes: int = Field(default=512 * 2**20, ge=1, description="Largest file that is taken")
    lease_s: float = Field(default=90, gt=0, description="How long an attempt is trusted after its last sign of life")
    renew_s: float = Field(default=10, gt=0, description="How often a supervisor renews the lease")
    poll_s: float = Field(default=0.5, gt=0, description="How often a supervisor looks at its run")
    stop_grace_s: float = Field(default=20, gt=0, description="Between asking processes to end and killing them")
    outage_limit_s: float = Field(default=900, gt=0, description="Without the database for so long, a run is stopped")
    host_timeout_s: float = Field(default=45, gt=0, description="A host that is silent for so long gets no new jobs")
    resend_s: float = Field(
        default=10, gt=0, description="A message whose attempt was not claimed by then is sent again"
    )
    sweep_s: float = Field(default=2, gt=0, description="How often the reconciler looks for what was lost")

    @property
    def artifacts(self) -> str:
        return self.artifacts_url or f"file://{(self.data_dir / 'artifacts').resolve()}"

    @property
    def runs_dir(self) -> Path:
        """Run directories of this host, `<job>/`."""
        return (self.data_dir / "runs").resolve()


@cache
def get_settings() -> Settings:
    """The settings of this process; read once."""
    return Settings()
