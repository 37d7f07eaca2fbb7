"""Supervised training with Hugging Face's Trainer and PEFT, as a worker of a Flotilla agent."""
