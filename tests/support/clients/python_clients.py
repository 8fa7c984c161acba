"""Clients of other makers by their defaults: prints what each of them got, as JSON.

Run by the Python that has them, see ``make clients``: ``python_clients.py URL MODEL``.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

URL, MODEL = sys.argv[1:]
KEY = "none"
ASK = "def add(a, b):"


def agents() -> Any:
    from agents import (
        Agent,
        ModelSettings,
        Runner,
        function_tool,
        set_default_openai_client,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY))
    called: list[int] = []

    @function_tool
    def double(number: int) -> str:
        """Return a number twice as large."""
        called.append(number)
        return str(2 * number)

    must = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    agent = Agent(name="a", instructions="Use tools.", tools=[double], model=MODEL,
                  model_settings=must, tool_use_behavior="stop_on_first_tool")  # fmt: skip

    async def run() -> Any:
        whole = await Runner.run(agent, ASK)
        streamed = Runner.run_streamed(agent, ASK)
        events = [event.type async for event in streamed.stream_events()]
        return [bool(whole.final_output), len(called) >= 2, len(events) > 3]

    return asyncio.run(run())


def pydantic_ai(kind: str) -> Callable[[], Any]:
    def run() -> Any:
        from pydantic import BaseModel
        from pydantic_ai import Agent
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.anthropic import AnthropicProvider
        from pydantic_ai.providers.openai import OpenAIProvider

        class Size(BaseModel):
            width: int

        of_openai = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
        models: dict[str, Any] = {
            "responses": lambda: OpenAIResponsesModel(MODEL, provider=of_openai),
            "chat": lambda: OpenAIChatModel(MODEL, provider=of_openai),
            "messages": lambda: AnthropicModel(
                MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY)
            ),
        }
        model, settings = models[kind](), {"max_tokens": 200}
        form = Agent(model, output_type=Size, model_settings=settings).run_sync(ASK).output
        text = Agent(model, model_settings=settings).run_sync(ASK).output
        return [isinstance(form.width, int), bool(text)]

    return run


def langchain() -> Any:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def double(number: int) -> int:
        """Return a number twice as large."""
        return 2 * number

    found = []
    for model in (
        ChatOpenAI(model=MODEL, use_responses_api=True, base_url=f"{URL}/v1", api_key=KEY,
                   max_tokens=100),
        ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=100),
    ):  # fmt: skip
        (call,) = (
            model.bind_tools([double], tool_choice="any", parallel_tool_calls=False)
            .invoke(ASK)
            .tool_calls[:1]
        )
        text = "".join(chunk.text for chunk in model.stream(ASK))
        found.append([call["name"], bool(model.invoke(ASK).text), bool(text)])
    return found


RUNS = {
    "openai-agents": agents, "langchain": langchain,
    **{f"pydantic-ai {kind}": pydantic_ai(kind) for kind in ("responses", "chat", "messages")},
}  # fmt: skip


def main() -> None:
    got: dict[str, Any] = {}
    for name, run in RUNS.items():
        try:
            got[name] = run()
        except Exception as error:
            got[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(got))


if __name__ == "__main__":
    main()
