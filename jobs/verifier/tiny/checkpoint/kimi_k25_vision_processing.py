"""Image processor of the miniature: vLLM asks AutoImageProcessor for one even where only text is served."""

from transformers.image_processing_utils import BaseImageProcessor


class KimiK25VisionProcessor(BaseImageProcessor):
    """Answers vLLM's start-up questions; the vision tower's weights are random, so images are refused."""

    model_type = "kimi_k25"
    num_frames_per_chunk = 4

    def media_tokens_calculator(self, media) -> int:
        return 4

    def preprocess(self, medias, **kwargs):
        raise NotImplementedError("the miniature's vision tower is untrained: it takes text only")

    def split_video_chunks(self, video):
        raise NotImplementedError("the miniature's vision tower is untrained: it takes text only")
