"""llama-index: an answer, a stream, a tool call, an object and an error."""

import openai
from common import HELLO, Person, add, key, model, show, url
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

to = {
    "api_base": f"{url}/v1",
    "api_key": key,
    "is_chat_model": True,
    "is_function_calling_model": True,
}
to |= {"temperature": 0, "max_tokens": 60, "max_retries": 0}
llm = OpenAILike(model=model, should_use_structured_outputs=True, **to)
short = OpenAILike(model=model, **{**to, "max_tokens": 8})
hello = [ChatMessage(role="user", content=HELLO)]
whole = short.chat(hello)
answer = llm.chat_with_tools([FunctionTool.from_defaults(add)], chat_history=hello)
(called,) = llm.get_tool_calls_from_response(answer)
try:
    OpenAILike(model="nobody", **to).chat(hello)
    refused = ""
except openai.NotFoundError as why:
    refused = str(why)
show(
    whole=whole.message.content,
    chunks=[part.delta for part in short.stream_chat(hello)],
    tokens=whole.raw.usage.completion_tokens,
    called=[called.tool_name, called.tool_kwargs],
    object=llm.structured_predict(Person, PromptTemplate("Describe a person.")).model_dump(),
    refused=refused,
)
