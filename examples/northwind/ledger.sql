-- The example's ledger: a database of its own, to which the steps of the workflow have their effects. It stands
-- for whatever your steps work on: a payment provider, a warehouse, another team's database.

-- How effects happen once. A step's key is the idempotency key that Fencepost gives it: the same for each of its
-- attempts, and for no other step.

-- The largest fencing token that was seen of each step, from it or from its undo, and who came with it: "step" is what
-- that was. Who comes with a smaller one has lost its lease, or is an attempt of a step that was undone.
create table fence (
    step_key text primary key,
    token bigint not null,
    worker text not null,
    order_id integer not null,
    step text not null,
    seen_at timestamptz not null default clock_timestamp()
);

-- Which steps have had their effect, and what they answered: written in the transaction of the effect itself.
create table effect (
    step_key text primary key,
    order_id integer not null,
    step text not null,
    answer text not null
);

-- Attempts that had no effect, to be counted: not errors, but what the two tables above are for.
create table without_effect (
    step_key text not null,
    token bigint not null,
    worker text not null,
    why text not null check (why in ('repeated', 'stale'))
);

-- What the business knows before the first order.

create table customer (
    customer_id text primary key,
    company text not null
);

create table product (
    product_id integer primary key,
    on_hand integer not null check (on_hand >= 0),
    discontinued boolean not null
);

-- What went wrong on the way, and is not an effect: each order meets a mishap of a kind once (mishaps.py).
create table mishap (
    order_id integer not null,
    kind text not null,
    primary key (order_id, kind)
);

-- The effects, a table for each step and for each undoing of one. There is no unique constraint on order_id anywhere:
-- nothing but the fence and the step key keeps an effect from happening twice, and the reconciliation at the end sees
-- whether they did.

create table accepted_order (
    order_id integer not null,
    customer_id text not null references customer
);

create table priced_line (
    order_id integer not null,
    product_id integer not null references product,
    quantity integer not null,
    net numeric(14, 4) not null
);

create table reservation (
    order_id integer not null,
    product_id integer not null references product,
    quantity integer not null
);

create table unreservation (
    order_id integer not null,
    product_id integer not null references product,
    quantity integer not null
);

create table purchase (
    order_id integer not null,
    product_id integer not null references product,
    quantity integer not null
);

create table payment (
    order_id integer not null,
    customer_id text not null references customer,
    amount numeric(14, 4) not null
);

create table refund (
    order_id integer not null,
    customer_id text not null references customer,
    amount numeric(14, 4) not null
);

create table shipment (
    order_id integer not null,
    country text not null,
    freight numeric(14, 2) not null
);

create table outbox (
    order_id integer not null,
    customer_id text not null references customer,
    total numeric(14, 4) not null
);
