"""Kinds of files that look like what an argument takes, told by the names of their entries."""

import re

LORA, EMBEDDING = "a LoRA", "a textual-inversion embedding"
# Pattern of an entry's name, joined by dots: (kind of the file, remedy). The first one counts.
KINDS = {
    # ControlNet Union, Control-LoRA, Stable Video Diffusion, unCLIP, depth, GLIGEN, SD 3, FLUX
    r"(^|\.)(lora_controlnet$|(double|joint)_blocks\.|task_embedding|noise_augmentor\.|time_stack\.|"
    r"time_mixer\.|temp_(convs|attentions)\.|class_embedding\.|depth_model\.|position_net\.)": (
        "of another family of models",
        "give Stable Diffusion 1.x, 2.x or SDXL",
    ),
    # LoHa, LoKr, IA3, OFT, DoRA, three factors, differences of whole weights
    r"hada_w|lokr_|\.on_input$|oft_(unet|te|blocks|diag)|dora_scale|lora_magnitude_vector|"
    r"lora_mid|\.diff(_b)?$|\.[wb]_norm$": (
        "an adapter, and no LoRA of two factors",
        "merge it into its model with the program that made it",
    ),
    r"lora_|[._]lora[._]|lycoris_|\.processor\.|\.alpha$": (LORA, "give it as lora="),
    r"^(emb_params|string_to_param|clip_[gl])(\.|$)": (EMBEDDING, "give it as embeddings="),
}


def refuse(what, names, takes=()):
    """Raise a ValueError if a file's names are of a kind that its argument does not take."""
    names = [name.replace("/", ".") for name in names]
    for pattern, (kind, remedy) in KINDS.items():
        found = next((name for name in names if re.search(pattern, name)), None)
        if found and kind not in takes:
            raise ValueError(f"{what} is {kind}, as {found} shows; {remedy}")
