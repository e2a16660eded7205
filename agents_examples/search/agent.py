"""An agent that searches documents for an answer: LangGraph, a model, and a tool.

OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=rl-run-... python agent.py "Where does the boss of Ada live?"
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from agents_examples.search.tools import INSTRUCTIONS, index

try:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.errors import GraphRecursionError
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition
except ImportError as error:
    install = f"{sys.executable} -m pip install -r {Path(__file__).with_name('requirements.txt')}"
    raise ImportError(f"this agent needs LangGraph ({error}); install it: {install}") from error

MOST_CALLS = 5
"""Calls of the model for one question: three searches, an answer, and one more search."""


async def search(query: str) -> str:
    """Search the documents."""
    return index().search(query)


def graph_with(model: ChatOpenAI) -> Any:
    """Return the graph: the model, the tool if it calls it, and the model again."""
    tools = [tool(search)]
    bound = model.bind_tools(tools)

    async def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke([("system", INSTRUCTIONS), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


async def answer(model: ChatOpenAI, question: str) -> str:
    """Return the model's answer, which is empty if it made a call that cannot be read, or searched too often. Raise
    openai.OpenAIError if a call of the model fails."""
    # A step is the model's or the tool's; the last one of MOST_CALLS calls has no tool's after it.
    limit = {"recursion_limit": 2 * MOST_CALLS - 1}
    try:
        state = await graph_with(model).ainvoke({"messages": [("user", question)]}, limit)
    except GraphRecursionError:
        return ""
    return str(state["messages"][-1].content)


async def attempt(task: dict[str, Any], session: Any) -> str:
    """Make one attempt for `base-rl attempts`. Return the answer."""
    model = ChatOpenAI(model=session.model, base_url=session.base_url, api_key=session.api_key, max_retries=0)
    return await answer(model, task["question"])


async def main() -> None:
    parser = argparse.ArgumentParser(description="Answer one question.")
    parser.add_argument("question", help='such as "Where does the boss of Ada live?"')
    parser.add_argument("--model", default="search", help="name of the model (default: %(default)s)")
    arguments = parser.parse_args()
    print(await answer(ChatOpenAI(model=arguments.model), arguments.question))


if __name__ == "__main__":
    asyncio.run(main())
