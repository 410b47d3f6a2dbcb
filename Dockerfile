# docker build -t lockstep .
# docker build -t lockstep --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .       for NVIDIA GPUs
# docker run --init --rm --ipc=host --user "$(id -u):$(id -g)" -v "$PWD:/work" lockstep fit run.yaml
# (--gpus all for GPUs; --ipc=host as workers of loaders share memory)
FROM python:3.11-slim AS build
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /dist

FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH="torch>=2.11"
ARG EXTRAS=plot
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH"
COPY --from=build /dist /dist
RUN pip install --no-cache-dir "$(echo /dist/*.whl)[$EXTRAS]" && useradd --create-home user
USER user
ENV HOME=/tmp USER=user
WORKDIR /work
ENTRYPOINT ["lockstep"]
CMD ["--help"]
