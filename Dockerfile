# The commands on a CPU: docker build -t keras-vit . && docker run --rm -v "$PWD:/data" keras-vit predict --help
FROM python:3.11-slim
WORKDIR /opt/keras-vit
COPY requirements.txt pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir -r requirements.txt
COPY keras_vit keras_vit
COPY training training
COPY export export
RUN pip install --no-cache-dir --no-deps .
WORKDIR /data
ENTRYPOINT ["keras-vit"]
