"""llm: an answer, a stream, an object and an error by its command, a tool call in Python. Prints what came, as JSON."""

import os
import sys
import tempfile

url, key, model, call = sys.argv[1:]
folder = tempfile.mkdtemp()
os.environ |= {"LLM_USER_PATH": folder, "LLM_MODEL": "kvrelay", "OPENAI_API_KEY": key}
