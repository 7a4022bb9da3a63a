"""Chats as data sets have them, whole or as random ones."""

import json

USER = {"role": "user", "content": "What is 4 + 4?"}


def forms(chat):
    """The same chat as data sets have it."""
    sharegpt = {"system": "system", "user": "human", "assistant": "gpt"}
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in chat]
    turned = [{"from": sharegpt[m["role"]], "value": m["content"]} for m in chat]
    struct = {key: [m[key] for m in chat] for key in ("role", "content")}
    return [chat, parts, turned, struct, json.dumps(chat), str(chat), json.dumps(turned), {"conversations": turned}]


def random_chat(draw, last):
    """Messages that take turns, of which the last is the user's or the assistant's."""
    roles = ["assistant", "user"] if last == "user" else ["user", "assistant"]
    chat = [{"role": r, "content": f"{draw.random()} {draw.choice('abc')}\n'é\""} for r in roles * draw.randrange(1, 3)]
    chat = chat[1:] if last == "user" else chat
    return [{"role": "system", "content": 'be "brief"'}] * draw.randrange(2) + chat
