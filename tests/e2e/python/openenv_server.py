"""Serves an OpenEnv environment on a free port of the loopback interface, and prints its address."""
import socket

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
import uvicorn


class Answer(Action):
    message: str
    unit: str = ""


class Heard(Observation):
    pass


class Doubling(Environment):
    """Rewards the double of the number that the episode starts with, and half for any number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number = 0

    def reset(self, seed=None, episode_id=None, **_):
        self.number = seed or 0
        return Heard()

    def step(self, action, timeout_s=None, **_):
        answer = action.message.strip().removesuffix(action.unit)
        reward = 1.0 if answer == str(2 * self.number) else 0.5 if answer.isdigit() else 0.0
        return Heard(reward=reward, done=True)

    @property
    def state(self):
        return State()


listener = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
app = create_fastapi_app(Doubling, Answer, Heard, max_concurrent_envs=8)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
