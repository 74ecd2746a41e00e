"""OpenAI's HTTP interface over an engine: parsing, answering, nothing else. See docs/serving.md."""
