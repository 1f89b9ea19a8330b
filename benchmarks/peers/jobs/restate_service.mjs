// Restate: ten ctx.run steps an invocation: `node restate_service.mjs PORT`.
const STEPS = 10;

// Its SDK asks for this; Node has it from version 22 on.
Promise.withResolvers ??= () => {
  let resolve, reject;
  const promise = new Promise((fulfil, fail) => { resolve = fulfil; reject = fail; });
  return { promise, resolve, reject };
};
const restate = await import("@restatedev/restate-sdk");

const flow = async (ctx, number) => {
  for (let index = 0; index < STEPS; index++) number = await ctx.run(`s${index}`, async () => number + 1);
  return number;
};

const service = restate.service({ name: "peer", handlers: { flow } });
await restate.serve({ services: [service], port: Number(process.argv[2]), logger: () => {} });
console.log(JSON.stringify({ event: "serving" }));
