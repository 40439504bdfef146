# The engine only, for CPUs, with the demo model and compiled kernels.
#   docker build -f deploy/engine.Dockerfile -t warmpath-engine .
FROM python:3.11.14-bookworm AS build
# Set to a mirror, or to the index of torch's CPU builds, which have a tenth of the size.
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
# The image runs on other CPUs than that of the build, so the kernels of every instruction set are compiled.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 WARMPATH_KERNEL_LEVELS=all
RUN python -m venv /opt/warmpath
WORKDIR /src
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY policies policies
COPY backend backend
RUN /opt/warmpath/bin/pip install --constraint constraints.txt ".[engine]"

FROM python:3.11.14-slim-bookworm
RUN useradd --system --uid 10001 --create-home warmpath \
 && install -d -o warmpath -g warmpath /var/lib/warmpath
COPY --from=build /opt/warmpath /opt/warmpath
# Models downloaded from the Hub are stored in the volume.
ENV PATH=/opt/warmpath/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/var/lib/warmpath/huggingface
USER warmpath
WORKDIR /var/lib/warmpath
EXPOSE 8000
ENTRYPOINT ["python", "-m", "backend", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--model", "demo"]
