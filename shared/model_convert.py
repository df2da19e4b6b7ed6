"""GGUF file to Hugging Face folder. Run as a process of its own, so that its gigabyte is given back at the end:
``python -m shared.model_convert FILE FOLDER``."""

from __future__ import annotations

import functools
import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write weights in float32, settings and tokenizer of ``gguf`` into ``folder``. The same file gives the same
    bytes, so that nodes that convert on their own share blocks."""
    import gguf as library

    # transformers parses the file three times and builds one map per module: half of the time, for equal results
    library.GGUFReader = functools.cache(library.GGUFReader)
    library.get_tensor_name_map = functools.cache(library.get_tensor_name_map)
    library.GGUFReader(str(gguf))  # a damaged file fails here, before the libraries have been loaded

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # what is left of the quantized form would have the folder loaded, and refused, as a quantized model
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
