"""The tables of README and docs/, from the results files.

    python -m benchmarks.tables

writes them into the pages. All results files are written by benchmarks, apart from demo.json: it
has the figures of the demo's summary.json and of the tables that evaluate_edits.py prints.

README or a page of docs/ marks the place of a table with the lines `<!-- results: NAME -->` and
`<!-- end of results -->`; NAME is a key of TABLES. tests/test_docs.py compares the pages with the
results files.
"""

import re

from benchmarks.tables import gpu, pair_costs, quality, readme, speed, tpu

PLACE = re.compile(r"(<!-- results: (\S+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)

TABLES = {
    "results": readme.results_table,
    "bounds": readme.bounds_table,
    "pytorch": speed.pytorch_table,
    "gpu": speed.gpu_table,
    "gpu_cards": gpu.cards_table,
    "gpu_shares": gpu.shares_table,
    "gpu_estimates": gpu.estimates_table,
    "gpu_image_moves": gpu.image_moves_table,
    "gpu_step_moves": gpu.step_moves_table,
    "gpu_fits": gpu.fits_table,
    "gpu_fits_training": gpu.training_fits_table,
    "pair_costs": pair_costs.pair_costs_table,
    "full_size": speed.full_size_table,
    "full_size_xl": speed.full_size_xl_table,
    "exports": speed.exports_table,
    "runtimes": speed.runtimes_table,
    "data": speed.data_table,
    "streaming": speed.streaming_table,
    "archives": speed.archives_table,
    "pairs": speed.pairs_table,
    "demo_evaluation": quality.demo_evaluation_table,
    "ema_quality": quality.ema_table,
    "acceleration_quality": quality.acceleration_quality_table,
    "text_to_image": quality.text_to_image_table,
    "storage": quality.storage_table,
    "made_pairs": quality.made_pairs_table,
    "made_pairs_short": quality.made_pairs_short_table,
    "made_pairs_fast": quality.made_pairs_fast_table,
    "made_pairs_thresholds": quality.made_pairs_thresholds_table,
    "distillation": quality.distillation_table,
    "tpu_train": tpu.train_table,
    "tpu_sdxl": tpu.sdxl_table,
    "tpu_shared": tpu.shared_table,
    "tpu_memory": tpu.little_memory_table,
    "acceleration_flops": tpu.acceleration_flops_table,
}


def fill(page: str) -> str:
    """A page with the tables of the results files."""
    return PLACE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[4]}", page)
