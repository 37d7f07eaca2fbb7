"""Downloads a pushed model with the hub's own library, checks its card, and loads the adapter.

    check_hub_model.py REPOSITORY BASE OUT

Prints the metadata and the figures of the card as JSON.
"""

import json
import math
import sys

import peft
from huggingface_hub import HfApi, ModelCard, snapshot_download
from huggingface_hub.utils import validate_repo_id


def check_card(card, base):
    data = card.data
    assert data.base_model == base, data.base_model
    validate_repo_id(data.base_model)
    again = ModelCard(str(card)).data.to_dict()
    assert again == data.to_dict(), again
    for result in data.eval_results:
        assert math.isfinite(result.metric_value), result
        assert result.dataset_revision.startswith("b3:"), result
    return [[it.metric_type, it.dataset_name, it.metric_value] for it in data.eval_results]


def main():
    repository, base, out = sys.argv[1:]
    snapshot_download(repository, local_dir=out)
    card = ModelCard.load(f"{out}/README.md")
    figures = check_card(card, base)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(repository)
    found = {
        "commit": HfApi().model_info(repository).sha,
        "data": card.data.to_dict(),
        "figures": figures,
        "model": type(model).__name__,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
