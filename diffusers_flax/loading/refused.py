"""Kinds of files that look like what an argument takes, told by the names of their entries."""

import re

MERGE = "merge it into its model with the program that made it"
LORA, EMBEDDING = "a LoRA", "a textual-inversion embedding"
# Pattern of an entry's name, joined by dots: (kind of the file, remedy). The first one counts.
KINDS = {
    r"(^|\.)lora_controlnet$": ("a Control-LoRA, for a ControlNet", "take a whole ControlNet"),
    r"hada_w": ("LoHa", MERGE),
    r"lokr_": ("LoKr", MERGE),
    r"\.on_input$": ("IA3", MERGE),
    r"oft_(unet|te|blocks|diag)": ("OFT", MERGE),
    r"dora_scale|lora_magnitude_vector": ("DoRA", MERGE),
    r"lora_mid": ("a LoRA of three factors (lora_mid)", MERGE),
    r"\.diff(_b)?$|\.[wb]_norm$": ("a LoRA with whole differences of weights", MERGE),
    r"lora_|[._]lora[._]|lycoris_|\.processor\.|\.alpha$": (LORA, "give it as lora="),
    r"^(emb_params|string_to_param|clip_[gl])(\.|$)": (EMBEDDING, "give it as embeddings="),
    r"^(control_model\.)?(task_embedding|control_add_embedding|control_type_proj)": (
        "a ControlNet Union, for several conditions in one",
        "give a ControlNet for one condition",
    ),
    r"time_stack\.|time_mixer\.|temopral_conv\.|temp_(convs|attentions)\.|motion_modules\.": (
        "Stable Video Diffusion, or another model of videos",
        "",
    ),
    r"^noise_augmentor\.|^embedder\.model\.|(^|\.)class_embedding\.linear_1\.": (
        "Stable Diffusion 2 unCLIP",
        "",
    ),
    r"^depth_model\.": ("Stable Diffusion 2 depth", ""),
    r"(^|\.)position_net\.": ("GLIGEN", ""),
    r"(^|\.)joint_blocks\.": ("Stable Diffusion 3", ""),
    r"(^|\.)double_blocks\.": ("FLUX", ""),
}


def refuse(what, names, takes=()):
    """Raise a ValueError if a file's names are of a kind that its argument does not take.

    Args:
        what: argument and file, for the error.
        names: of the file's entries.
        takes: kinds that the argument takes.
    """
    names = [name.replace("/", ".") for name in names]
    for pattern, (kind, remedy) in KINDS.items():
        found = next((name for name in names if re.search(pattern, name)), None)
        if found and kind not in takes:
            remedy = remedy or "give Stable Diffusion 1.x, 2.x or SDXL"
            problem = "" if kind in (LORA, EMBEDDING) else f" ({found}), which is not supported"
            raise ValueError(f"{what} is {kind}{problem}; {remedy}")
