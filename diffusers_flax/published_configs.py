"""Configs of published models, where they differ from the defaults of the Flax classes."""

_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
_TEXT_ENCODER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_attention_heads": 12,
}
_NOISE_SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "steps_offset": 1,
}
PUBLISHED_CONFIGS = {
    "stable-diffusion-v1-5": {
        "unet": {"sample_size": 64, "cross_attention_dim": 768},
        "vae": _VAE | {"sample_size": 512},
        "text_encoder": _TEXT_ENCODER,
        "scheduler": _NOISE_SCHEDULE
        | {"_class_name": "PNDMScheduler", "set_alpha_to_one": False, "skip_prk_steps": True},
    },
    "stable-diffusion-xl-base-1.0": {
        "unet": {
            "sample_size": 128,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (320, 640, 1280),
            "attention_head_dim": (5, 10, 20),
            "transformer_layers_per_block": (1, 2, 10),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        "vae": _VAE | {"sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True},
        "text_encoder": _TEXT_ENCODER,
        "text_encoder_2": {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "projection_dim": 1280,
            "num_attention_heads": 20,
            "num_hidden_layers": 32,
            "hidden_act": "gelu",
        },
        "scheduler": _NOISE_SCHEDULE
        | {"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "leading"},
    },
    # Tiny autoencoders of Stable Diffusion and SDXL: all entries are defaults.
    "taesd": {"vae": {}},
    "taesdxl": {"vae": {}},
}

REFINER_FEATURES = 2560  # of pooled text and time ids of SDXL's refiner: 1280 + 5 * 256

# CosXL and CosXL Edit are published as single files; PyTorch's users give them this scheduler.
COSXL_SCHEDULER = {
    "_class_name": "EDMEulerScheduler",
    "sigma_min": 0.002,
    "sigma_max": 120.0,
    "sigma_data": 1.0,
    "sigma_schedule": "exponential",
    "prediction_type": "v_prediction",
}
# Scheduler option: name of its entry in a single file of CosXL.
COSXL_ENTRIES = {"sigma_min": "edm_vpred.sigma_min", "sigma_max": "edm_vpred.sigma_max"}
