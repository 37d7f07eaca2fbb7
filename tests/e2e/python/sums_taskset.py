"""Sums as a taskset of Prime Intellect's verifiers. A wrong number is worth half a point."""
import verifiers.v1 as vf


class SumData(vf.TaskData):
    total: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        reply = trace.last_reply.strip()
        return 1.0 if reply == str(self.data.total) else 0.5 if reply.isdigit() else 0.0


class SumsTaskset(vf.Taskset[SumTask]):
    def load(self):
        for a, b in [(1, 2), (3, 4)]:
            yield SumTask(SumData(prompt=f"{a}+{b}=", system_prompt="Add.", total=a + b))


__all__ = ["SumsTaskset"]
