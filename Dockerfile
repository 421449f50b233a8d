# Two images from one file: `--target api` (small, no torch) and `--target worker` (CUDA comes inside torch's wheels).
FROM python:3.11-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app
COPY pyproject.toml constraints.txt README.md ./

FROM base AS api
COPY . .
RUN pip install --constraint constraints.txt .
# Not root; the id is fixed so that mounted folders can be given to it.
RUN useradd --uid 10001 --create-home burnish && mkdir /data && chown burnish /data
USER burnish
ENV BURNISH_DATA_DIR=/data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"
CMD ["uvicorn", "api.main:app", "--host", "0.0.0.0", "--port", "8000", "--no-access-log"]

FROM base AS worker
# A compiler: DeepSpeed and Triton build kernels at first use.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
# torch goes first: deepspeed looks at it while it is built, so it cannot be built in isolation.
RUN pip install --constraint constraints.txt torch numpy setuptools wheel ninja
RUN DS_BUILD_OPS=0 pip install --constraint constraints.txt --no-build-isolation deepspeed
COPY . .
RUN pip install --constraint constraints.txt '.[train]'
RUN useradd --uid 10001 --create-home burnish && mkdir /data && chown burnish /data
USER burnish
ENV BURNISH_DATA_DIR=/data BURNISH_MODEL_CACHE=/data/models
# Not Celery itself: this ends running trainings with a checkpoint when the container stops, and starts Celery again when
# it dies, without touching them.
CMD ["burnish", "worker"]
