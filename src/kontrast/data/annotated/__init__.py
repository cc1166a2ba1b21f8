"""Images with boxes, masks and keypoints: the embedded canvases, COCO JSON and VOC XML, and the geometry of objects."""

from kontrast.data.annotated.annotated_images import AnnotatedImages
from kontrast.data.annotated.canvases import canvas_objects
from kontrast.data.annotated.coco_files import write_coco
from kontrast.data.annotated.object_geometry import crop, flip, resize
from kontrast.data.annotated.objects import Objects
from kontrast.data.annotated.open_annotated import open_annotated
from kontrast.data.annotated.voc_files import write_voc

__all__ = [
    "AnnotatedImages", "Objects", "canvas_objects", "crop", "flip", "open_annotated", "resize", "write_coco",
    "write_voc",
]  # fmt: skip
