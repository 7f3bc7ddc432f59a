"""Annotations: the masks and boxes of images, read from the formats of COCO, Pascal VOC, YOLO, CSV and PNG."""
